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

from tinsmith.engine.model import attention, flex_attention, packing
from tinsmith.engine.model.loading import BaseModel
from tinsmith.engine.sampling.prefix_cache import Found, Run


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens from start to stop of a run, or of the pass at hand."""

    run: Run | None
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Their keys and values in a layer [heads, N, width]; those of the pass are [1, heads, C, width]."""
        keys, values = (key[0], value[0]) if self.run is None else (self.run.keys[layer], self.run.values[layer])
        return keys[:, self.start : self.stop], values[:, self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Read:
    """A prompt that has been read: its last hidden state [D], and where its keys and values are."""

    last: Tensor
    where: tuple[Stretch, ...]
    kept: Sequence[tuple[Tensor, Tensor]] = ()
    """Of the pass, layer by layer [1, heads, C, width]."""

    @property
    def length(self) -> int:
        return sum(one.length for one in self.where)

    def write(self, keys: Tensor, values: Tensor, first: int = 0) -> None:
        """Copy those of the positions from `first` on into [layers, heads, N, width]."""
        at = 0
        for one in self._since(first):
            into = slice(at, at + one.length)
            if one.run is not None:
                keys[:, :, into] = one.run.keys[:, :, one.start : one.stop]
                values[:, :, into] = one.run.values[:, :, one.start : one.stop]
            else:
                for layer, passed in enumerate(self.kept):
                    keys[layer, :, into], values[layer, :, into] = one.of(layer, *passed)
            at = into.stop

    def since(self, first: int) -> tuple[Tensor, Tensor]:
        """The same in memory of their own; only of what was in the pass, at least in part."""
        _, heads, _, width = self.kept[0][0].shape
        size = (len(self.kept), heads, self.length - first, width)
        keys, values = self.kept[0][0].new_empty(size), self.kept[0][1].new_empty(size)
        self.write(keys, values, first)
        return keys, values

    def _since(self, first: int) -> Iterator[Stretch]:
        for one in self.where:
            skipped = min(first, one.length)
            first -= skipped
            if skipped < one.length:
                yield Stretch(one.run, one.start + skipped, one.stop)


def whole(found: Found) -> Read:
    """A prompt that was read before."""
    assert found.last is not None
    return Read(found.last, tuple(Stretch(run, 0, count) for run, count in found.pieces))


FEW = 128
"""Queries up to which scores are made whole: faster on a CPU than its flash kernel, while they are small."""

PIECE = 512
"""Queries of one call of a kernel: its mask has as many rows, and memory grows with the length alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the pass."""

    row: packing.Row
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
    spans: tuple[packing.Span, ...]
    context: attention.Packed | flex_attention.Flexed | Partial
    stretches: dict[int, tuple[Stretch, ...]]
    """Row key -> where its keys and values are."""
    hidden: dict[int, Tensor]
    """Row key -> int64 [N]: where its positions stand in the pass, 0 for those that it leaves out."""


def prefill(prompts: Sequence[Prompt], base: BaseModel) -> Prefill:
    """The pass over these prompts."""
    forest, device = packing.pack([prompt.row for prompt in prompts]), base.device
    places = _places(prompts, forest)
    chosen = np.flatnonzero(places.run < 0)
    spans = [
        packing.Span(adapter=span.adapter, start=int(start), stop=int(stop))
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


def _places(prompts: Sequence[Prompt], forest: packing.Forest) -> _Places:
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
    mask: Tensor
    """Additive [Q, M], of the last M keys; those before are seen by every query."""


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
            found = attended(query[0, :, part.start : part.stop], seen, part.mask, scale)
            output[0, part.start : part.stop] = found.transpose(0, 1)
        return output


def _parts(forest: packing.Forest, chosen: np.ndarray, places: _Places, base: BaseModel) -> Iterator[_Part]:
    cpu = base.device.type == "cpu"
    # Where plain products beat the flash kernel by much, long parts are cut to be computed by them.
    most = FEW if cpu and base.dtype == torch.bfloat16 else PIECE
    longest = max(len(path) for path in forest.index.values())
    rows = min(most, len(chosen))
    # What the last queries of a sequence see of its keys: the masks of all parts without branches are ends of it.
    past = attention.additive(np.tri(rows, longest, longest - rows, dtype=bool), base.dtype, base.device)
    for job in forest.jobs:
        start, stop = (int(one) for one in np.searchsorted(chosen, [job.start, job.stop]))
        if start == stop:
            continue
        path = np.concatenate([np.arange(*run) for run in (*job.prefix, (job.start, job.stop))])
        depth = len(path) - (job.stop - job.start)
        if job.mask is not None and job.stop - job.start <= packing.MERGED_QUERIES:
            seen, mask = _branches(job.mask[chosen[start:stop] - job.start])
            yield _Part(start, stop, places.stretches(path[:seen]), attention.additive(mask, base.dtype, base.device))
            continue
        for low, high in packing.runs(chosen[start:stop]):  # a longer job is one row's: it sees all before and its past
            for first in range(low, high, most):
                last = min(first + most, high)
                count, keys = last - first, depth + last - job.start
                begin = int(places.at[first])
                mask = past[rows - count :, longest - (count if cpu and count <= FEW else keys) :]
                yield _Part(begin, begin + count, places.stretches(path[:keys]), mask)


def _branches(allowed: np.ndarray) -> tuple[int, np.ndarray]:
    """bool [Q, K] -> how many keys any query sees, and of these the mask [Q, M] of the last, which not all see."""
    keys = int(np.flatnonzero(allowed.any(0))[-1]) + 1
    partly = np.flatnonzero(~allowed[:, :keys].all(0))
    return keys, allowed[:, int(partly[0]) if partly.size else keys : keys]


Seen = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [Hkv, K, D] of each stretch."""


def _joined(query: Tensor, seen: Seen, mask: Tensor, scale: float) -> Tensor:
    """query [Hq, Q, D] -> [Hq, Q, D], by one call of the kernel."""
    key, value = (torch.cat(parts, dim=1)[None] for parts in zip(*seen, strict=True))
    if before := key.shape[2] - mask.shape[1]:
        mask = torch.nn.functional.pad(mask, (before, 0))
    return attention.attend_once(query[None], key, value, mask.contiguous(), scale)[0]


def _folded(query: Tensor, seen: Seen, mask: Tensor, scale: float) -> Tensor:
    """The same by plain products, stretch by stretch: query heads that share a key head are rows of one matrix."""
    heads, length = len(seen[0][0]), query.shape[1]
    folded = (query * scale).reshape(heads, -1, query.shape[2])
    scores = torch.cat([torch.bmm(folded, key.transpose(1, 2)) for key, _ in seen], dim=2)
    keys = scores.shape[2]
    scores.view(heads, -1, length, keys)[..., keys - mask.shape[1] :] += mask
    chances = torch.softmax(scores, -1, out=scores).split([key.shape[1] for key, _ in seen], dim=2)
    output = torch.bmm(chances[0], seen[0][1])
    for some, (_, value) in zip(chances[1:], seen[1:], strict=True):
        output.baddbmm_(some, value)
    return output.view(-1, length, query.shape[2])
