"""Where the keys and values of a prompt are: in runs of the prefixes, and in the pass that computed the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from tinsmith.engine.prefixes import Found, Run


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
