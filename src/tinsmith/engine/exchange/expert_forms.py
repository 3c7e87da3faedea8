"""The routed experts of a layer in the forms of an adapter, where r is its rank and E the number of experts.

    tinker      experts.{w1,w2,w3}.lora_{A,B}: 3-D as `AdapterSite.shapes` says; a checkpoint holds this form
    fused       experts.base_layer.lora_{A,B} for gate and up together, experts.lora_{A,B} for down, or for whichever
                of them the adapter has: A [E * rank, in], B [out, rank * E] with the expert as the fastest index
    per_expert  experts.N.{gate,up,down}_proj.lora_{A,B}: a pair for each expert

Tinker's adapters have two pairs for gate and up. Fused they are one, of rank 2 r: A stacked, B block-diagonal. Adapters
that PEFT trains have one pair of rank r for both: here it becomes two pairs with the same A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tinsmith.engine.lora.adapter import LoraPair
from tinsmith.engine.lora.targets import ExpertTarget

Matrices = tuple[Tensor, Tensor]
"""A and B."""


def fused(target: ExpertTarget, pairs: Mapping[str, LoraPair], *, interleaved: bool) -> dict[str, Matrices]:
    """A layer's experts in the fused form, by the name of the parameter. `interleaved`: gate and up take turns in its
    rows. An adapter may lack one of the two parameters."""
    matrices: dict[str, Matrices] = {}
    leaves = _up_leaves(target)
    up = [pairs[name] for leaf in leaves if (name := f"{target.name}.{leaf}") in pairs]
    if up:
        ranks = [pair.b.shape[-1] for pair in up]
        a = torch.cat([pair.a for pair in up], dim=1).expand(target.experts, -1, -1)  # [E, ranks, in]
        b, column = torch.zeros(target.experts, len(leaves) * target.intermediate, sum(ranks)), 0
        for number, leaf in enumerate(leaves):
            if (pair := pairs.get(f"{target.name}.{leaf}")) is not None:
                rows, rank = _gate_or_up(b, number, len(leaves), interleaved=interleaved), pair.b.shape[-1]
                rows[..., column : column + rank] = pair.b
                column += rank
        matrices[expert_parameter(target, leaves[0])] = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
    if (down := pairs.get(f"{target.name}.w2")) is not None:
        down_b = down.b.expand(target.experts, -1, -1)
        down_a = down.a.expand(target.experts, -1, -1)
        matrices[expert_parameter(target, "w2")] = down_a.flatten(0, 1), down_b.permute(1, 2, 0).flatten(1)
    return matrices


def per_expert(target: ExpertTarget, pairs: Mapping[str, LoraPair], names: Mapping[str, str]) -> dict[str, Matrices]:
    """A layer's experts with a pair for each, by module name; `names` has the name of each site's projection."""
    matrices = {}
    for leaf, name in names.items():
        if (pair := pairs.get(f"{target.name}.{leaf}")) is None:
            continue
        a, b = (matrix.expand(target.experts, -1, -1) for matrix in (pair.a, pair.b))
        matrices |= {f"{target.name}.{expert}.{name}": (a[expert], b[expert]) for expert in range(target.experts)}
    return matrices


def read_fused(
    target: ExpertTarget, modules: list[Matrices], rank: int, *, interleaved: bool
) -> Iterator[tuple[str, str, int, Matrices]]:
    """(site, parameter, its rank, A [E, rank, in] and B [E, out, rank] of the site) from a layer's fused modules.

    A pair of twice the rank `rank` whose B is block-diagonal is one for gate and one for up.
    """
    leaves = _up_leaves(target)
    for matrices in modules:
        a, b = _by_expert(target, *matrices)
        rows, columns, whole = b.shape[1], a.shape[2], a.shape[1]
        if (rows, columns) == (target.hidden, target.intermediate) and (len(modules) == 1 or matrices is modules[-1]):
            yield f"{target.name}.w2", expert_parameter(target, "w2"), whole, (a, b)
            continue
        if (rows, columns) != (len(leaves) * target.intermediate, target.hidden):
            raise ValueError(f"{target.name} has matrices of {columns} inputs and {rows} outputs")
        pieces = [_gate_or_up(b, number, len(leaves), interleaved=interleaved) for number in range(len(leaves))]
        own = block_columns(pieces, rank)
        for leaf, piece, part in zip(leaves, pieces, own, strict=True):
            yield f"{target.name}.{leaf}", expert_parameter(target, leaf), whole, (a[:, part], piece[..., part])


def block_columns(pieces: Sequence[Tensor], rank: int) -> list[slice]:
    """Which columns of a B belong to each of the pieces of its rows: blocks of one width if it is block-diagonal, else
    all columns for each.

    A B of zeros is block-diagonal if its blocks have the rank `rank`.
    """
    columns = pieces[0].shape[-1]
    width = columns // len(pieces)
    own = [slice(number * width, (number + 1) * width) for number in range(len(pieces))]
    counts = [
        (int(piece.count_nonzero()), int(piece[..., part].count_nonzero()))
        for piece, part in zip(pieces, own, strict=True)
    ]
    is_diagonal = width * len(pieces) == columns and all(whole == inside for whole, inside in counts)
    if is_diagonal and (width == rank or all(inside for _, inside in counts)):
        return own
    return [slice(None)] * len(pieces)


def expert_parameter(target: ExpertTarget, leaf: str) -> str:
    """Path of the fused parameter that holds a site's weights."""
    if leaf == "w2":
        return f"{target.name}.down_proj"
    return f"{target.name}.{'gate_up_proj' if target.has_gate else 'up_proj'}"


def shared_or_none(leaf: str, a: Tensor, b: Tensor) -> Matrices | None:
    """A and B of all experts [E, ...] with the matrix on the hidden side once; None if experts differ in it."""
    side = b if leaf == "w2" else a
    if (side != side[:1]).any():
        return None
    return (a, b[:1]) if leaf == "w2" else (a[:1], b)


def _up_leaves(target: ExpertTarget) -> tuple[str, ...]:
    return ("w1", "w3") if target.has_gate else ("w1",)


def _gate_or_up(rows: Tensor, number: int, count: int, *, interleaved: bool) -> Tensor:
    """The rows [E, I, ...] of gate (0) or up (1) of a fused projection's rows [E, count * I, ...]."""
    return rows[:, number::count] if interleaved else rows.chunk(count, dim=1)[number]


def _by_expert(target: ExpertTarget, a: Tensor, b: Tensor) -> Matrices:
    """A [E, rank, in] and B [E, out, rank] from the fused form."""
    return a.view(target.experts, -1, a.shape[1]), b.view(len(b), -1, target.experts).permute(2, 0, 1)
