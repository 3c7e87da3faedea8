"""What the sampler still knows of what it has read and said: keys and values, found again by their tokens; and the
last hidden state of each prompt, so that a prompt asked again needs no pass, and says to the bit what it said.

A tree for each trunk (a version's life and a space: what may share at all). Its nodes are runs of tokens; a run hangs
on its parent where it leaves it, which may be in the middle, so nothing is ever split and nothing is kept twice. The
run that was used least lately goes first; a parent counts as used after its children, so that one is always a leaf.

Left out: sequences that are running. They have rows of their own (`cache.py`), copied from here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

Trunk = tuple[str, int, str]
"""A version's name (empty: the base model), which of those that had this name, and the space."""


@dataclass(eq=False, slots=True)
class Run:
    """Tokens int32 [N] and their keys and values [layers, heads, N, width], after `at` tokens of the parent."""

    tokens: np.ndarray
    keys: Tensor
    values: Tensor
    parent: Run | None
    at: int
    children: dict[tuple[int, int], Run] = field(default_factory=dict)
    """By where they leave this run and the token that they begin with."""
    ends: dict[int, Tensor] = field(default_factory=dict)
    """Last hidden states [D] of prompts that end after so many tokens of this run."""


@dataclass(frozen=True, slots=True)
class Found:
    """The beginning of a prompt that is known: so many tokens of each run, one after the other."""

    pieces: tuple[tuple[Run, int], ...] = ()
    last: Tensor | None = None
    """The last hidden state [D], if it is the whole prompt and was one before."""

    @property
    def length(self) -> int:
        return sum(count for _, count in self.pieces)


Content = Callable[[int], tuple[Tensor, Tensor]]
"""A sequence's keys and values [layers, heads, N, width] from a position on, in memory of their own."""


class Prefixes:
    """All trunks. `tokens` is what their runs hold."""

    def __init__(self) -> None:
        self.tokens = 0
        self._tops: dict[Trunk, dict[int, Run]] = {}
        """Runs that begin a sequence, by their first token."""
        self._order: OrderedDict[int, tuple[Trunk, Run]] = OrderedDict()
        """Least lately used first, by the run's identity."""

    def find(self, trunk: Trunk, tokens: np.ndarray, most: int) -> Found:
        """The longest known beginning of `tokens` (int32 [N]), of `most` tokens at most."""
        pieces, left = [], most
        for run, count in self._walk(trunk, tokens):
            pieces.append((run, min(count, left)))
            left -= pieces[-1][1]
            if not left:
                break
        return Found(tuple((run, count) for run, count in pieces if count))

    def find_whole(self, trunk: Trunk, tokens: np.ndarray) -> Found | None:
        """All of a prompt with its last hidden state, if it was asked before."""
        path = self._walk(trunk, tokens)
        if sum(count for _, count in path) < len(tokens):
            return None
        run, count = path[-1]
        return Found(tuple(path), run.ends[count]) if count in run.ends else None

    def mark(self, trunk: Trunk, tokens: np.ndarray, last: Tensor) -> None:
        """Keep a prompt's last hidden state [D], if the prompt itself is kept."""
        path = self._walk(trunk, tokens)
        if sum(count for _, count in path) == len(tokens):
            run, count = path[-1]
            run.ends.setdefault(count, last.clone())

    def add(self, trunk: Trunk, tokens: np.ndarray, content: Content) -> None:
        """Keep what is new of a sequence: tokens int32 [N], and what gives their keys and values."""
        path = self._walk(trunk, tokens)
        known = sum(count for _, count in path)
        if known < len(tokens):
            parent, at = path[-1] if path else (None, 0)
            run = Run(tokens[known:].copy(), *content(known), parent, at)
            if parent is None:
                self._tops.setdefault(trunk, {})[int(tokens[0])] = run
            else:
                parent.children[at, int(tokens[known])] = run
            self.tokens += len(run.tokens)
            self._order[id(run)] = (trunk, run)
            path.append((run, len(run.tokens)))
        self.touch(Found(tuple(path)))

    def touch(self, found: Found) -> None:
        """It was used now."""
        for run, _ in reversed(found.pieces):
            self._order.move_to_end(id(run))

    def lend(self, found: Found) -> None:
        """A sequence has copied it and will bring it back when it ends: if room is short, it goes before all others."""
        lent: list[Run] = []
        for run, _ in reversed(found.pieces):
            if any(child not in lent for child in run.children.values()):
                break  # another sequence goes through here
            lent.append(run)
        for run in reversed(lent):
            self._order.move_to_end(id(run), last=False)

    def shrink(self, most: int) -> None:
        """Drop runs until they hold `most` tokens at most."""
        while self.tokens > max(most, 0):
            _, (trunk, run) = self._order.popitem(last=False)
            self.tokens -= len(run.tokens)
            if run.parent is not None:
                del run.parent.children[run.at, int(run.tokens[0])]
                continue
            del self._tops[trunk][int(run.tokens[0])]
            if not self._tops[trunk]:
                del self._tops[trunk]

    def drop(self, version: str) -> None:
        """Forget a version's runs: those of trunks that begin with its name."""
        for trunk in [trunk for trunk in self._tops if trunk[0] == version]:
            del self._tops[trunk]
        for key in [key for key, (trunk, _) in self._order.items() if trunk[0] == version]:
            _, run = self._order.pop(key)
            self.tokens -= len(run.tokens)

    def _walk(self, trunk: Trunk, tokens: np.ndarray) -> list[tuple[Run, int]]:
        """The runs along `tokens`, each with how many of its tokens agree."""
        path: list[tuple[Run, int]] = []
        at = 0
        run = self._tops.get(trunk, {}).get(int(tokens[0])) if len(tokens) else None
        while run is not None:
            count = _common(run.tokens, tokens[at:])
            path.append((run, count))
            at += count
            run = run.children.get((count, int(tokens[at]))) if at < len(tokens) else None
        return path


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the common beginning."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if differs.size else length
