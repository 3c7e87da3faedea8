"""The prefix cache: matching, eviction order, scopes; compared with a plain set of all added prefixes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.sampling.prefixes.cache import PrefixCache, PrefixMatch, PrefixScope

SCOPE: PrefixScope = ("version", 1, "")
OTHER_SCOPE: PrefixScope = ("version", 1, "another")


def tensors(tokens: np.ndarray) -> torch.Tensor:
    """Keys [1, 1, N, 1] that encode the whole prefix of each position."""
    marks = [float(hash(tuple(tokens[: end + 1].tolist())) % 2**20) for end in range(len(tokens))]
    return torch.tensor(marks)[None, None, :, None]


def add(cache: PrefixCache, scope: PrefixScope, *tokens: int) -> None:
    row = np.array(tokens, np.int32)
    cache.add(scope, row, lambda first: (tensors(row)[:, :, first:], -tensors(row)[:, :, first:]))


def match(cache: PrefixCache, scope: PrefixScope, *tokens: int, max_tokens: int = 99) -> PrefixMatch:
    return cache.match(scope, np.array(tokens, np.int32), max_tokens)


def cached_keys(result: PrefixMatch) -> torch.Tensor:
    return torch.cat([torch.zeros(1, 1, 0, 1), *(run.keys[:, :, :count] for run, count in result.path)], dim=2)


def test_longer_sequence_adds_only_new_tokens() -> None:
    cache = PrefixCache()
    add(cache, SCOPE, 1, 2, 3)
    add(cache, SCOPE, 1, 2, 3, 4, 5)
    add(cache, SCOPE, 1, 2, 9)
    add(cache, SCOPE, 1, 2)
    assert cache.tokens == 6
    assert match(cache, SCOPE, 1, 2, 3, 4, 6).length == 4
    assert match(cache, SCOPE, 1, 2, 9, 9).length == 3
    assert match(cache, SCOPE, 2).length == 0
    assert match(cache, SCOPE, 1, 2, 3, 4, 5, max_tokens=2).length == 2


def test_scopes_share_nothing() -> None:
    cache = PrefixCache()
    add(cache, SCOPE, 1, 2, 3)
    assert match(cache, OTHER_SCOPE, 1, 2, 3).length == 0


def test_shrink_evicts_least_recently_used_leaves() -> None:
    cache = PrefixCache()
    add(cache, SCOPE, 1, 2, 3)
    add(cache, SCOPE, 1, 2, 3, 4, 5)
    add(cache, SCOPE, 7, 8)
    cache.touch(match(cache, SCOPE, 1, 2, 3))
    cache.shrink(6)
    assert [match(cache, SCOPE, *row).length for row in ((1, 2, 3, 4, 5), (7, 8))] == [3, 2]
    cache.shrink(4)
    assert [match(cache, SCOPE, *row).length for row in ((1, 2, 3, 4, 5), (7, 8))] == [3, 0]
    cache.shrink(0)
    assert cache.tokens == 0
    add(cache, SCOPE, 1)
    assert match(cache, SCOPE, 1).length == 1


def test_evict_first_puts_a_prompt_before_all_others() -> None:
    cache = PrefixCache()
    add(cache, SCOPE, 1, 2, 3)
    add(cache, SCOPE, 7, 8)
    cache.evict_first(match(cache, SCOPE, 7, 8))
    cache.shrink(3)
    assert [match(cache, SCOPE, *row).length for row in ((1, 2, 3), (7, 8))] == [3, 0]


def test_evict_first_keeps_nodes_of_other_sequences() -> None:
    cache = PrefixCache()
    add(cache, SCOPE, 7, 8)
    for row in ((1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6), (1, 2, 9)):
        add(cache, SCOPE, *row)
    cache.evict_first(match(cache, SCOPE, 1, 2, 3, 4, 5, 6))
    cache.shrink(6)
    assert [match(cache, SCOPE, *row).length for row in ((1, 2, 3, 4, 5, 6), (1, 2, 9), (7, 8))] == [3, 3, 2]


def test_match_prompt_needs_a_last_hidden_state() -> None:
    cache = PrefixCache()
    rows = [np.array(row, np.int32) for row in ((1, 2, 3), (1, 2, 3, 4, 5))]
    add(cache, SCOPE, 1, 2, 3, 4, 5)
    cache.add_last_hidden(SCOPE, rows[0], torch.ones(2))
    cache.add_last_hidden(
        SCOPE, np.array((1, 2, 3, 4, 5, 6), np.int32), torch.zeros(2)
    )  # ignored: the prompt is not cached
    result = cache.match_prompt(SCOPE, rows[0])
    assert result is not None
    assert result.last_hidden is not None
    assert torch.equal(result.last_hidden, torch.ones(2))
    assert torch.equal(cached_keys(result), tensors(rows[0]))
    assert cache.match_prompt(SCOPE, rows[1]) is None
    assert cache.match_prompt(SCOPE, rows[0][:2]) is None
    assert cache.match_prompt(OTHER_SCOPE, rows[0]) is None


def test_drop_version_removes_all_its_scopes() -> None:
    cache = PrefixCache()
    for scope in (SCOPE, OTHER_SCOPE, ("base", 0, "")):
        add(cache, scope, 1, 2, 3)
        add(cache, scope, 1, 2, 4)
    cache.drop_version("version")
    assert cache.tokens == 4
    assert [match(cache, scope, 1, 2, 4).length for scope in (SCOPE, OTHER_SCOPE, ("base", 0, ""))] == [0, 0, 3]
    cache.shrink(0)
    assert cache.tokens == 0


_ROWS = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([SCOPE, OTHER_SCOPE]), _ROWS),
        st.tuples(st.just("find"), st.sampled_from([SCOPE, OTHER_SCOPE]), _ROWS),
        st.tuples(st.just("shrink"), st.integers(0, 12), st.none()),
    ),
    max_size=40,
)


@given(_STEPS)
@settings(deadline=None)
def test_cache_equals_list_of_prefixes_in_any_order(steps: list) -> None:
    """Matches are always correct; as long as nothing was evicted, they are also the longest."""
    cache, added, dropped = PrefixCache(), {SCOPE: set(), OTHER_SCOPE: set()}, False
    for kind, first, row in steps:
        if kind == "shrink":
            dropped = dropped or cache.tokens > first
            cache.shrink(first)
            assert cache.tokens <= first
            continue
        if kind == "add":
            add(cache, first, *row)
            added[first] |= {row[: end + 1] for end in range(len(row))}
        result = match(cache, first, *row)
        assert torch.equal(cached_keys(result), tensors(np.array(row))[:, :, : result.length])
        longest = max((len(item) for item in added[first] if row[: len(item)] == item), default=0)
        assert result.length == longest or (dropped and kind == "find" and result.length < longest)
        cache.touch(result)
    if not dropped:
        assert cache.tokens == sum(len(prefixes) for prefixes in added.values())
