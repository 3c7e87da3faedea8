"""Routing of sampling requests to the replica whose prefix cache holds most of the prompt. Pure: no I/O, no clock.

A prompt is a chain of blocks; the hash of a block covers all tokens before it, the adapter version and the cache scope.
The table knows which replicas were given a block last. Two requests with a common beginning meet at the same replica as
long as it is not much busier than the others. The half of the prompt that must be covered keeps a system prompt that
all requests share from drawing all of them to one replica.

Hashes are Python's own, keyed by the process: a collision, which nobody outside can construct, costs a cache miss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

BLOCK = 64
LONG_BLOCK = 256
LONG_PROMPT = 8192
"""Position in a prompt from which blocks have LONG_BLOCK tokens, to bound the cost of long prompts."""
ENTRIES = 1_000_000
"""Blocks in the table, least recently used first out: 64 million tokens of prompts."""
REPLICAS_PER_BLOCK = 4
"""Replicas remembered for a block, most recent first."""
SPILL_FACTOR = 1.5
SPILL_ANSWERS = 8
"""A replica is preferred while its load is below SPILL_FACTOR times the mean plus this many answers."""

Block = tuple[int, int]
"""End of a block in the prompt, and its hash."""


def prompt_blocks(prompt: np.ndarray, root: Hashable) -> list[Block]:
    """The blocks of a prompt (int32 [N]), shortest prefix first; a prompt below BLOCK tokens is one block.

    `root` is what a cached prefix depends on besides its tokens: the version and the cache scope.
    """
    data = np.ascontiguousarray(prompt, np.int32).tobytes()
    length = len(prompt)
    ends = [*range(BLOCK, min(length, LONG_PROMPT) + 1, BLOCK)]
    ends += range(LONG_PROMPT + LONG_BLOCK, length + 1, LONG_BLOCK)
    blocks, start, value = [], 0, hash(root)
    for end in ends or [length]:
        value = hash((value, data[4 * start : 4 * end]))
        blocks.append((end, value))
        start = end
    return blocks


class PrefixTable:
    """Which replicas were given a block of a prompt. Replicas are numbers that are never used again, so the entries of
    a replica that has died match nothing and age out."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self._entries = entries
        self._replicas: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """By hash of a block, least recently used first."""

    def __len__(self) -> int:
        return len(self._replicas)

    def find(self, blocks: Sequence[Block], length: int, accepts: Callable[[int], bool]) -> int | None:
        """The replica of the deepest block that covers at least half of a prompt of `length` tokens, among those that
        `accepts`; None if there is none."""
        for end, value in reversed(blocks):
            if 2 * end < length:
                return None
            for replica in self._replicas.get(value, ()):
                if accepts(replica):
                    return replica
        return None

    def record(self, blocks: Sequence[Block], replica: int) -> None:
        """The replica is given a prompt with these blocks."""
        table = self._replicas
        for _, value in blocks:
            replicas = table.get(value, ())
            if not replicas or replicas[0] != replica:
                others = tuple(other for other in replicas if other != replica)
                table[value] = (replica, *others[: REPLICAS_PER_BLOCK - 1])
            table.move_to_end(value)
        while len(table) > self._entries:
            table.popitem(last=False)


class Choice(NamedTuple):
    """A replica, and whether it was chosen for the prefix that it has."""

    replica: int
    by_prefix: bool


def choose_replica(
    table: PrefixTable,
    blocks: Sequence[Block],
    length: int,
    loads: Mapping[int, float],
    answer: float,
    holders: frozenset[int] = frozenset(),
) -> Choice:
    """The replica for a prompt of `length` tokens: one that has its prefix, else the least loaded.

    `loads` are the tokens in flight of the living replicas, at least one; `answer` those that one sample of this
    request adds. Among equally loaded replicas, within one answer, the `holders` of the adapter version come first. The
    choice is not recorded.
    """
    limit = SPILL_FACTOR * sum(loads.values()) / len(loads) + SPILL_ANSWERS * answer
    replica = table.find(blocks, length, lambda replica: replica in loads and loads[replica] < limit)
    if replica is not None:
        return Choice(replica, by_prefix=True)
    least = min(loads, key=loads.__getitem__)
    near = [replica for replica in holders if replica in loads and loads[replica] <= loads[least] + answer]
    return Choice(least if least in holders else min(near, key=loads.__getitem__, default=least), by_prefix=False)
