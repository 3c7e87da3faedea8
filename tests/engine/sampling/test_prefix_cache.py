"""The tree of known prefixes against a plain list of everything that was ever added."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.sampling.prefix_cache import PrefixCache, PrefixMatch, PrefixScope

ONE: PrefixScope = ("version", 1, "")
OTHER: PrefixScope = ("version", 1, "another")


def tensors(tokens: np.ndarray) -> torch.Tensor:
    """Keys that tell the whole beginning of each position: [layers 1, heads 1, N, width 1]."""
    marks = [float(hash(tuple(tokens[: end + 1].tolist())) % 2**20) for end in range(len(tokens))]
    return torch.tensor(marks)[None, None, :, None]


def add(prefixes: PrefixCache, scope: PrefixScope, *tokens: int) -> None:
    row = np.array(tokens, np.int32)
    prefixes.add(scope, row, lambda first: (tensors(row)[:, :, first:], -tensors(row)[:, :, first:]))


def find(prefixes: PrefixCache, scope: PrefixScope, *tokens: int, most: int = 99) -> PrefixMatch:
    return prefixes.match(scope, np.array(tokens, np.int32), most)


def read(found: PrefixMatch) -> torch.Tensor:
    return torch.cat([torch.zeros(1, 1, 0, 1), *(run.keys[:, :, :count] for run, count in found.path)], dim=2)


def test_a_longer_sequence_adds_only_what_is_new() -> None:
    prefixes = PrefixCache()
    add(prefixes, ONE, 1, 2, 3)
    add(prefixes, ONE, 1, 2, 3, 4, 5)
    add(prefixes, ONE, 1, 2, 9)
    add(prefixes, ONE, 1, 2)
    assert prefixes.tokens == 6
    assert find(prefixes, ONE, 1, 2, 3, 4, 6).length == 4
    assert find(prefixes, ONE, 1, 2, 9, 9).length == 3
    assert find(prefixes, ONE, 2).length == 0
    assert find(prefixes, ONE, 1, 2, 3, 4, 5, most=2).length == 2


def test_nothing_is_found_in_another_trunk() -> None:
    prefixes = PrefixCache()
    add(prefixes, ONE, 1, 2, 3)
    assert find(prefixes, OTHER, 1, 2, 3).length == 0


def test_the_least_lately_used_goes_first_and_never_before_what_hangs_on_it() -> None:
    prefixes = PrefixCache()
    add(prefixes, ONE, 1, 2, 3)
    add(prefixes, ONE, 1, 2, 3, 4, 5)
    add(prefixes, ONE, 7, 8)
    prefixes.touch(find(prefixes, ONE, 1, 2, 3))
    prefixes.shrink(6)
    assert [find(prefixes, ONE, *row).length for row in ((1, 2, 3, 4, 5), (7, 8))] == [3, 2]
    prefixes.shrink(4)
    assert [find(prefixes, ONE, *row).length for row in ((1, 2, 3, 4, 5), (7, 8))] == [3, 0]
    prefixes.shrink(0)
    assert prefixes.tokens == 0
    add(prefixes, ONE, 1)
    assert find(prefixes, ONE, 1).length == 1


def test_what_a_running_sequence_holds_too_goes_before_all_others() -> None:
    prefixes = PrefixCache()
    add(prefixes, ONE, 1, 2, 3)
    add(prefixes, ONE, 7, 8)
    prefixes.evict_first(find(prefixes, ONE, 7, 8))
    prefixes.shrink(3)
    assert [find(prefixes, ONE, *row).length for row in ((1, 2, 3), (7, 8))] == [3, 0]


def test_a_conversation_that_is_lent_goes_whole_and_others_on_it_stay() -> None:
    prefixes = PrefixCache()
    add(prefixes, ONE, 7, 8)
    for row in ((1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6), (1, 2, 9)):
        add(prefixes, ONE, *row)
    prefixes.evict_first(find(prefixes, ONE, 1, 2, 3, 4, 5, 6))
    prefixes.shrink(6)
    assert [find(prefixes, ONE, *row).length for row in ((1, 2, 3, 4, 5, 6), (1, 2, 9), (7, 8))] == [3, 3, 2]


def test_a_whole_prompt_is_found_with_its_last_state_just_where_it_ended() -> None:
    prefixes = PrefixCache()
    rows = [np.array(row, np.int32) for row in ((1, 2, 3), (1, 2, 3, 4, 5))]
    add(prefixes, ONE, 1, 2, 3, 4, 5)
    prefixes.add_last_hidden(ONE, rows[0], torch.ones(2))
    prefixes.add_last_hidden(ONE, np.array((1, 2, 3, 4, 5, 6), np.int32), torch.zeros(2))  # which is not kept
    found = prefixes.match_prompt(ONE, rows[0])
    assert found is not None
    assert found.last_hidden is not None
    assert torch.equal(found.last_hidden, torch.ones(2))
    assert torch.equal(read(found), tensors(rows[0]))
    assert prefixes.match_prompt(ONE, rows[1]) is None
    assert prefixes.match_prompt(ONE, rows[0][:2]) is None
    assert prefixes.match_prompt(OTHER, rows[0]) is None


def test_a_version_is_dropped_whole() -> None:
    prefixes = PrefixCache()
    for scope in (ONE, OTHER, ("base", 0, "")):
        add(prefixes, scope, 1, 2, 3)
        add(prefixes, scope, 1, 2, 4)
    prefixes.drop_version("version")
    assert prefixes.tokens == 4
    assert [find(prefixes, scope, 1, 2, 4).length for scope in (ONE, OTHER, ("base", 0, ""))] == [0, 0, 3]
    prefixes.shrink(0)
    assert prefixes.tokens == 0


_ROWS = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([ONE, OTHER]), _ROWS),
        st.tuples(st.just("find"), st.sampled_from([ONE, OTHER]), _ROWS),
        st.tuples(st.just("shrink"), st.integers(0, 12), st.none()),
    ),
    max_size=40,
)


@given(_STEPS)
@settings(deadline=None)
def test_any_order_of_adding_finding_and_dropping(steps: list) -> None:
    """What is found is always right; while nothing was dropped, it is also the longest that was ever added."""
    prefixes, ever, dropped = PrefixCache(), {ONE: set(), OTHER: set()}, False
    for kind, first, row in steps:
        if kind == "shrink":
            dropped = dropped or prefixes.tokens > first
            prefixes.shrink(first)
            assert prefixes.tokens <= first
            continue
        if kind == "add":
            add(prefixes, first, *row)
            ever[first] |= {row[: end + 1] for end in range(len(row))}
        found = find(prefixes, first, *row)
        assert torch.equal(read(found), tensors(np.array(row))[:, :, : found.length])
        longest = max((len(one) for one in ever[first] if row[: len(one)] == one), default=0)
        assert found.length == longest or (dropped and kind == "find" and found.length < longest)
        prefixes.touch(found)
    if not dropped:
        assert prefixes.tokens == sum(len(known) for known in ever.values())
