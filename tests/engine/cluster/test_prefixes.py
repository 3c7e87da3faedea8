"""The prefix table against a plain search over all prompts seen, and the bounds of the routing rule."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.cluster.prefixes import BLOCK, LONG_BLOCK, LONG_PROMPT, PrefixTable, choose_replica, prompt_blocks

prompts = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300), st.integers(0, 2)), min_size=1, max_size=12)
"""Prompts of a few kinds: the kind of the first half, the length, the kind of the second half."""


def _prompt(first: int, length: int, second: int) -> np.ndarray:
    tokens = np.full(length, first, np.int32)
    tokens[length // 2 :] += 10 * second
    return tokens


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Tokens of the longest common prefix."""
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size


def test_blocks_cover_whole_prompt_in_two_sizes() -> None:
    prompt = np.arange(LONG_PROMPT + 3 * LONG_BLOCK + 5, dtype=np.int32)
    ends = [end for end, _ in prompt_blocks(prompt, "v")]
    assert ends[:2] == [BLOCK, 2 * BLOCK]
    assert ends[-3:] == [LONG_PROMPT + LONG_BLOCK, LONG_PROMPT + 2 * LONG_BLOCK, LONG_PROMPT + 3 * LONG_BLOCK]
    assert prompt_blocks(prompt[:LONG_PROMPT], "v") == prompt_blocks(prompt, "v")[: LONG_PROMPT // BLOCK]
    assert len(prompt_blocks(prompt[:3], "v")) == 1


def test_versions_and_scopes_share_no_block() -> None:
    prompt = np.arange(200, dtype=np.int32)
    roots = [("v1", "a"), ("v1", "b"), ("v2", "a"), (None, "a")]
    hashes = [value for root in roots for _, value in prompt_blocks(prompt, root)]
    assert len(set(hashes)) == len(hashes) == 12


@given(prompts)
@settings(max_examples=60, deadline=None)
def test_find_equals_search_over_all_prompts(kinds: list[tuple[int, int, int]]) -> None:
    table, seen = PrefixTable(), []
    for replica, kind in enumerate(kinds):
        prompt = _prompt(*kind)
        blocks = prompt_blocks(prompt, "v")
        chosen = table.find(blocks, len(prompt), lambda _: True)
        # Whole blocks that the prompt shares with an earlier one, of which only whole blocks were recorded.
        shared = [_common(prompt, other) for other in seen]
        covered = [
            count // BLOCK * BLOCK if len(prompt) >= BLOCK else count * (count == len(prompt) == len(other))
            for count, other in zip(shared, seen, strict=True)
        ]
        best = max(covered, default=0)
        if 2 * best < len(prompt):
            assert chosen is None
        else:
            latest = max(index for index, count in enumerate(covered) if count == best)
            assert chosen == latest
        table.record(blocks, replica)
        seen.append(prompt)


@given(
    st.dictionaries(st.integers(0, 9), st.integers(0, 5000), min_size=1),
    st.lists(st.integers(0, 9), max_size=4),
    st.frozensets(st.integers(0, 12)),
)
def test_choice_is_alive_and_within_the_bound(
    loads: dict[int, float], recorded: list[int], holders: frozenset[int]
) -> None:
    table, prompt = PrefixTable(), np.arange(100, dtype=np.int32)
    blocks = prompt_blocks(prompt, "v")
    for replica in recorded:
        table.record(blocks, replica)
    chosen, by_prefix = choose_replica(table, blocks, 100, loads, 10.0, holders)
    limit = 1.5 * sum(loads.values()) / len(loads) + 80
    assert chosen in loads
    cached = [replica for replica in dict.fromkeys(reversed(recorded)) if replica in loads and loads[replica] < limit]
    assert by_prefix == bool(cached)
    if cached:
        assert chosen == cached[0]
    else:
        assert loads[chosen] <= min(loads.values()) + 10


def test_common_system_prompt_does_not_draw_requests() -> None:
    table, system = PrefixTable(), np.zeros(128, np.int32)
    table.record(prompt_blocks(system, "v"), 1)
    short = np.concatenate([system, np.ones(100, np.int32)])
    long = np.concatenate([system, np.ones(300, np.int32)])
    assert table.find(prompt_blocks(short, "v"), len(short), lambda _: True) == 1
    assert table.find(prompt_blocks(long, "v"), len(long), lambda _: True) is None


def test_least_recently_used_blocks_leave() -> None:
    table = PrefixTable(entries=4)
    prompts = [np.full(2 * BLOCK, kind, np.int32) for kind in range(3)]
    first, second, third = (prompt_blocks(prompt, "v") for prompt in prompts)
    table.record(first, 1)
    table.record(second, 2)
    table.record(first, 1)
    table.record(third, 3)
    replicas = [table.find(blocks, 2 * BLOCK, lambda _: True) for blocks in (first, second, third)]
    assert (replicas, len(table)) == ([1, None, 3], 4)
