"""The pass over new prompts: only what is not known of them goes through the model.

All prompts are packed as one forest, equal beginnings once. The positions whose keys and values were found among the
prefixes are left out of the pass, unless something is asked about them; the others read them where they are, so that
nothing is copied. Keys and values of the pass are kept, for the rows of the answers to be filled from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine import attention, batch, flex
from tinsmith.engine.models import BaseModel
from tinsmith.engine.prefixes import Found, Run
from tinsmith.engine.stretches import Stretch

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
    stretches: dict[int, tuple[Stretch, ...]]
    """Row key -> where its keys and values are."""
    hidden: dict[int, Tensor]
    """Row key -> int64 [N]: where its positions stand in the pass, 0 for those that it leaves out."""


def prefill(prompts: Sequence[Prompt], base: BaseModel) -> Prefill:
    """The pass over these prompts."""
    forest, device = batch.pack([prompt.row for prompt in prompts]), base.device
    places = _places(prompts, forest)
    chosen = np.flatnonzero(places.run < 0)
    spans = [
        batch.Span(adapter=span.adapter, start=int(start), stop=int(stop))
        for span in forest.spans
        for start, stop in [np.searchsorted(chosen, [span.start, span.stop])]
    ]
    return Prefill(
        tokens=torch.as_tensor(forest.tokens[chosen], device=device),
        positions=torch.as_tensor(forest.positions[chosen], device=device),
        spans=tuple(spans),
        context=Partial(list(_parts(forest, chosen, places, base)))
        if places.runs
        else attention.packed(forest, base.dtype, device, keep=True),
        stretches={key: places.stretches(index) for key, index in forest.index.items()},
        hidden={
            key: torch.as_tensor(np.where(places.run[index] < 0, places.at[index], 0), device=device)
            for key, index in forest.index.items()
        },
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the keys and values of each of the forest's T positions are."""

    runs: Sequence[Run]
    run: np.ndarray
    """int64 [T]: which of the runs, or -1 for the pass."""
    at: np.ndarray
    """int64 [T]: where in the run or in the pass."""

    def stretches(self, path: np.ndarray) -> tuple[Stretch, ...]:
        """Of packed positions, in order."""
        run, at = self.run[path], self.at[path]
        cuts = np.flatnonzero((np.diff(run) != 0) | (np.diff(at) != 1)) + 1
        return tuple(
            Stretch(self.runs[run[start]] if run[start] >= 0 else None, int(at[start]), int(at[stop - 1]) + 1)
            for start, stop in pairwise([0, *cuts.tolist(), len(path)])
        )


def _places(prompts: Sequence[Prompt], forest: batch.Forest) -> _Places:
    """What is found is read where it is; the rest, and what is wanted of it all the same, goes through the pass."""
    runs, numbers = list[Run](), dict[int, int]()
    run, at = np.full(len(forest.tokens), -1), np.zeros(len(forest.tokens), np.int64)
    for prompt in prompts:
        first = 0
        for piece, count in prompt.found.pieces:
            if id(piece) not in numbers:
                numbers[id(piece)] = len(runs)
                runs.append(piece)
            ids = forest.index[prompt.row.key][first : first + count]
            run[ids], at[ids] = numbers[id(piece)], np.arange(count)
            first += count
    for prompt in prompts:
        run[forest.index[prompt.row.key][prompt.needed :]] = -1
    passed = run < 0
    at[passed] = np.arange(int(passed.sum()))
    return _Places(runs, run, at)


@dataclass(frozen=True, slots=True)
class _Part:
    """One attention call: queries of the pass from start to stop, and all that any of them sees."""

    start: int
    stop: int
    seen: tuple[Stretch, ...]
    masks: tuple[Tensor | None, ...]
    """For each stretch: additive [Q, keys], or None if every query sees all of it."""


@dataclass(slots=True)
class Partial:
    """Attention of the pass over itself and what is known; its keys and values stay, as in `attention.Packed`."""

    parts: Sequence[_Part]
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, Hq, C, D], key and value [1, Hkv, C, D] -> [1, C, Hq, D]."""
        self.kept.append((key, value))
        output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        for part in self.parts:
            seen = [stretch.of(layer, key, value) for stretch in part.seen]
            attended = _folded if query.device.type == "cpu" and part.stop - part.start <= FEW else _joined
            found = attended(query[0, :, part.start : part.stop], seen, part.masks, scale)
            output[0, part.start : part.stop] = found.transpose(0, 1)
        return output


def _parts(forest: batch.Forest, chosen: np.ndarray, places: _Places, base: BaseModel) -> Iterator[_Part]:
    # Where plain products beat the flash kernel by much, long parts are cut to be computed by them.
    most = FEW if base.device.type == "cpu" and base.dtype == torch.bfloat16 else len(chosen)
    for job in forest.jobs:
        start, stop = (int(one) for one in np.searchsorted(chosen, [job.start, job.stop]))
        whole = np.tri(job.stop - job.start, dtype=bool) if job.mask is None else job.mask
        path = np.concatenate([np.arange(*run) for run in (*job.prefix, (job.start, job.stop))])
        for first in range(start, stop, most):
            last = min(first + most, stop)
            allowed = whole[chosen[first:last] - job.start]
            keys = int(np.flatnonzero(allowed.any(0))[-1]) + 1
            seen = places.stretches(path[:keys])
            edges = np.cumsum([0, *(one.length for one in seen)])
            masks = [allowed[:, low:high] for low, high in pairwise(edges)]
            yield _Part(first, last, seen, tuple(_additive(mask, base) for mask in masks))


def _additive(allowed: np.ndarray, base: BaseModel) -> Tensor | None:
    return None if allowed.all() else attention.additive(allowed, base.dtype, base.device)


Seen = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [Hkv, K, D] of each stretch."""


def _joined(query: Tensor, seen: Seen, masks: Sequence[Tensor | None], scale: float) -> Tensor:
    """query [Hq, Q, D] -> [Hq, Q, D], by one call of the kernel."""
    key, value = (torch.cat(parts, dim=1)[None] for parts in zip(*seen, strict=True))
    whole = [
        query.new_zeros(query.shape[1], keys.shape[1]) if mask is None else mask
        for (keys, _), mask in zip(seen, masks, strict=True)
    ]
    return attention.attend_once(query[None], key, value, torch.cat(whole, dim=1), scale)[0]


def _folded(query: Tensor, seen: Seen, masks: Sequence[Tensor | None], scale: float) -> Tensor:
    """The same by plain products, stretch by stretch: query heads that share a key head are rows of one matrix."""
    heads, length = len(seen[0][0]), query.shape[1]
    folded = (query * scale).reshape(heads, -1, query.shape[2])
    scores = []
    for (key, _), mask in zip(seen, masks, strict=True):
        found = torch.bmm(folded, key.transpose(1, 2))
        if mask is not None:
            found.view(heads, -1, *mask.shape).add_(mask)
        scores.append(found)
    chances = torch.cat(scores, dim=2).softmax(dim=-1).split([key.shape[1] for key, _ in seen], dim=2)
    output = torch.bmm(chances[0], seen[0][1])
    for some, (_, value) in zip(chances[1:], seen[1:], strict=True):
        output.baddbmm_(some, value)
    return output.view(-1, length, query.shape[2])
