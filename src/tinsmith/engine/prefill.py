"""The pass over new prompts: only what is not known of them goes through the model.

All prompts are packed as one forest, equal beginnings once. The positions whose keys and values were found among the
prefixes are left out of the pass, unless something is asked about them; the others attend to both. Keys and values of
the whole forest are put together layer by layer and kept, for the rows of the answers to be copied from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine import attention, batch, flex
from tinsmith.engine.models import BaseModel
from tinsmith.engine.prefixes import Found, Run

FEW = 128
"""Queries up to which scores are made whole: faster on a CPU than its flash kernel, while they are small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the pass."""

    row: batch.Row
    found: Found
    needed: int
    """The first position whose hidden state is wanted; nothing of `found` reaches beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """What goes through the model: C of the forest's T packed positions."""

    tokens: Tensor
    """int32 [C]."""
    positions: Tensor
    """int64 [C]."""
    spans: tuple[batch.Span, ...]
    context: attention.Packed | flex.Flexed | Partial
    index: dict[int, np.ndarray]
    """Row key -> int64 [N]: where its positions stand in the forest."""
    hidden: dict[int, Tensor]
    """Row key -> int64 [N]: where they stand in the pass, 0 for those that it leaves out."""


def prefill(prompts: Sequence[Prompt], base: BaseModel) -> Prefill:
    """The pass over these prompts."""
    forest, device = batch.pack([prompt.row for prompt in prompts]), base.device
    known, runs = _known(prompts, forest)
    wanted = np.ones(len(forest.tokens), bool) if not runs else ~known
    for prompt in prompts:
        wanted[forest.index[prompt.row.key][prompt.needed :]] = True
    chosen = np.flatnonzero(wanted)
    place = np.cumsum(wanted) - 1
    spans = [
        batch.Span(adapter=span.adapter, start=int(start), stop=int(stop))
        for span in forest.spans
        for start, stop in [np.searchsorted(chosen, [span.start, span.stop])]
    ]
    return Prefill(
        tokens=torch.as_tensor(forest.tokens[chosen], device=device),
        positions=torch.as_tensor(forest.positions[chosen], device=device),
        spans=tuple(spans),
        context=_partial(forest, chosen, runs, base)
        if runs
        else attention.packed(forest, base.dtype, device, keep=True),
        index=forest.index,
        hidden={
            key: torch.as_tensor(np.where(wanted[index], place[index], 0), device=device)
            for key, index in forest.index.items()
        },
    )


def _known(prompts: Sequence[Prompt], forest: batch.Forest) -> tuple[np.ndarray, list[tuple[Run, np.ndarray]]]:
    """bool [T]: positions found; and the runs they come from, each once, with the packed ids of its tokens."""
    known, runs = np.zeros(len(forest.tokens), bool), dict[int, tuple[Run, np.ndarray]]()
    for prompt in prompts:
        at = 0
        for run, count in prompt.found.pieces:
            ids = forest.index[prompt.row.key][at : at + count]
            known[ids] = True
            at += count
            if id(run) not in runs or len(runs[id(run)][1]) < count:
                runs[id(run)] = (run, ids)
    return known, list(runs.values())


@dataclass(frozen=True, slots=True)
class _Part:
    """One attention call: queries of the pass from start to stop, over runs of the forest, with an additive mask."""

    start: int
    stop: int
    runs: tuple[tuple[int, int], ...]
    mask: Tensor
    """[Q, K]."""


@dataclass(slots=True)
class Partial:
    """Attention of the chosen positions over the whole forest; keys and values stay, as in `attention.Packed`."""

    size: int
    chosen: Tensor
    """int64 [C]."""
    parts: Sequence[_Part]
    runs: Sequence[tuple[Run, tuple[tuple[int, int], ...]]]
    """Each with the stretches of the forest that its tokens are."""
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, Hq, C, D], key and value [1, Hkv, C, D] -> [1, C, Hq, D]."""
        keys, values = (new.new_empty(1, new.shape[1], self.size, new.shape[3]) for new in (key, value))
        for run, stretches in self.runs:
            at = 0
            for start, stop in stretches:
                source = slice(at, at + stop - start)
                keys[0, :, start:stop], values[0, :, start:stop] = (
                    run.keys[layer, :, source],
                    run.values[layer, :, source],
                )
                at = source.stop
        keys[:, :, self.chosen], values[:, :, self.chosen] = key, value
        self.kept.append((keys, values))
        output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        for part in self.parts:
            seen = [torch.cat([one[:, :, start:stop] for start, stop in part.runs], dim=2) for one in (keys, values)]
            found = _attended(query[:, :, part.start : part.stop], seen[0], seen[1], part.mask, scale)
            output[:, part.start : part.stop] = found.transpose(1, 2)
        return output


def _partial(
    forest: batch.Forest, chosen: np.ndarray, runs: Sequence[tuple[Run, np.ndarray]], base: BaseModel
) -> Partial:
    parts = []
    for job in forest.jobs:
        start, stop = (int(one) for one in np.searchsorted(chosen, [job.start, job.stop]))
        if start < stop:
            whole = np.tri(job.stop - job.start, dtype=bool) if job.mask is None else job.mask
            mask = attention.additive(whole[chosen[start:stop] - job.start], base.dtype, base.device)
            parts.append(_Part(start, stop, (*job.prefix, (job.start, job.stop)), mask))
    return Partial(
        size=len(forest.tokens),
        chosen=torch.as_tensor(chosen, device=base.device),
        parts=parts,
        runs=[(run, batch.runs(ids)) for run, ids in runs],
    )


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query [1, Hq, Q, D], key and value [1, Hkv, K, D], mask [Q, K] -> [1, Hq, Q, D]."""
    if query.device.type != "cpu" or query.shape[2] > FEW:
        return attention.attend_once(query, key, value, mask, scale)
    # Query heads that share a key head stand as rows of one matrix: [Hkv, Hq / Hkv, Q, K].
    queries = query[0].unflatten(0, (key.shape[1], -1))
    scores = torch.matmul(queries.flatten(1, 2), key[0].transpose(1, 2)).unflatten(1, (-1, query.shape[2]))
    chances = scores.mul_(scale).add_(mask).softmax(dim=-1)
    return torch.matmul(chances.flatten(1, 2), value[0]).view(1, query.shape[1], *query.shape[2:])
