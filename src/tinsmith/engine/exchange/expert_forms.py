"""The routed experts of a layer in the forms of an adapter, where r is its rank and E the number of experts.

    tinker      experts.{w1,w2,w3}.lora_{A,B}: 3-D as `AdapterSite.shapes` says; a checkpoint holds this form
    fused       experts.base_layer.lora_{A,B} for gate and up together, experts.lora_{A,B} for down, or for whichever
                of them the adapter has: A [E * rank, in], B [out, rank * E] with the expert as the fastest index
    per_expert  experts.N.{gate,up,down}_proj.lora_{A,B}: a pair for each expert

Tinker's adapters have two pairs for gate and up. Fused they are one, of rank 2 r: A stacked, B block-diagonal. Adapters
that PEFT trains have one pair of rank r for both: here it becomes two pairs with the same A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tinsmith.engine.lora.adapter import LoraPair
from tinsmith.engine.lora.targets import ExpertTarget

Matrices = tuple[Tensor, Tensor]
"""A and B."""


def fused(target: ExpertTarget, pairs: Mapping[str, LoraPair], rank: int, *, interleaved: bool) -> dict[str, Matrices]:
    """A layer's experts in the fused form, by module name. `interleaved`: gate and up take turns in its rows."""
    up = [pairs[f"{target.name}.{leaf}"] for leaf in _up_leaves(target)]
    a = torch.cat([pair.a for pair in up], dim=1).expand(target.experts, -1, -1)  # [E, ranks, in]
    b = torch.zeros(target.experts, len(up) * target.intermediate, len(up) * rank)
    for number, pair in enumerate(up):
        _gate_or_up(b, number, len(up), interleaved=interleaved)[..., number * rank : (number + 1) * rank] = pair.b
    down = pairs[f"{target.name}.w2"]
    down_b = down.b.expand(target.experts, -1, -1)
    return {
        f"{target.name}.base_layer": (a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)),
        target.name: (down.a.expand(target.experts, -1, -1).flatten(0, 1), down_b.permute(1, 2, 0).flatten(1)),
    }


def per_expert(target: ExpertTarget, pairs: Mapping[str, LoraPair], names: Mapping[str, str]) -> dict[str, Matrices]:
    """A layer's experts with a pair for each, by module name; `names` has the name of each site's projection."""
    matrices = {}
    for leaf, name in names.items():
        pair = pairs[f"{target.name}.{leaf}"]
        a, b = (matrix.expand(target.experts, -1, -1) for matrix in (pair.a, pair.b))
        matrices |= {f"{target.name}.{expert}.{name}": (a[expert], b[expert]) for expert in range(target.experts)}
    return matrices


def read_fused(
    target: ExpertTarget, modules: list[Matrices], rank: int, *, interleaved: bool
) -> Iterator[tuple[str, Matrices]]:
    """(site, A [E, rank, in] and B [E, out, rank]) from the matrices of a layer's modules in the fused form."""
    leaves = _up_leaves(target)
    for matrices in modules:
        a, b = _by_expert(target, *matrices)
        rows, columns = b.shape[1], a.shape[2]
        if (rows, columns) == (target.hidden, target.intermediate) and (len(modules) == 1 or matrices is modules[-1]):
            yield f"{target.name}.w2", (a, b)
            continue
        if (rows, columns) != (len(leaves) * target.intermediate, target.hidden):
            raise ValueError(f"{target.name} has matrices of {columns} inputs and {rows} outputs")
        pieces = [_gate_or_up(b, number, len(leaves), interleaved=interleaved) for number in range(len(leaves))]
        own = [slice(number * rank, (number + 1) * rank) for number in range(len(leaves))]
        if a.shape[1] == len(leaves) * rank and all(
            piece.count_nonzero() == piece[..., part].count_nonzero() for piece, part in zip(pieces, own, strict=True)
        ):  # block-diagonal
            for leaf, piece, part in zip(leaves, pieces, own, strict=True):
                yield f"{target.name}.{leaf}", (a[:, part], piece[..., part])
        else:
            for leaf, piece in zip(leaves, pieces, strict=True):
                yield f"{target.name}.{leaf}", (a, piece)


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
