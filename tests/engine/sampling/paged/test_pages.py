"""Pages: rows keep their content through any history, and every page is freed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.sampling.test_kv_cache import SHAPE, prefilled
from tinsmith.engine.sampling.capacity import PAGE_TOKENS, paged_tokens
from tinsmith.engine.sampling.paged.pages import FIRST_PAGES, UNUSED, CacheFull, PagedCache, PagedRow
from tinsmith.engine.sampling.prefill import PrefilledPrompt

LENGTHS = st.sampled_from([1, 5, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 3 * PAGE_TOKENS, 1000])


def content(row: PagedRow) -> torch.Tensor:
    keys, values = row.copy_from(0)
    assert torch.equal(values, -keys)
    return keys


def insert(cache: PagedCache, dense: torch.Tensor) -> PagedRow:
    """`dense` [layers, heads, N, width] are the keys; values are their negatives."""
    return cache.insert(prefilled([(layer[None], -layer[None]) for layer in dense]))


def append(cache: PagedCache, row: PagedRow, token: torch.Tensor) -> None:
    """`token` is [layers, heads, 1, width]."""
    cache.ensure_space(row)
    cache.copy_pages()
    page, place = row.pages[row.length // PAGE_TOKENS], row.length % PAGE_TOKENS
    for layer, part in enumerate(token[:, :, 0]):
        cache.keys[layer][page, :, place], cache.values[layer][page, :, place] = part, -part
    row.length += 1


@given(st.lists(st.tuples(st.sampled_from(["insert", "copy", "append", "remove"]), st.integers(0, 99), LENGTHS)))
def test_rows_keep_their_content_in_any_history(history: list[tuple[str, int, int]]) -> None:
    draw = torch.Generator().manual_seed(0)
    cache = PagedCache(SHAPE, 0)
    rows: list[tuple[PagedRow, torch.Tensor]] = []
    for action, pick, length in history:
        number = pick % len(rows) if rows else 0
        if action == "insert" or not rows:
            dense = torch.randn(2, 2, length, 4, generator=draw)
            rows.append((insert(cache, dense), dense))
        elif action == "copy":
            rows.append((cache.copy(rows[number][0]), rows[number][1]))
        elif action == "remove":
            cache.remove(rows.pop(number)[0])
        else:
            row, dense = rows[number]
            token = torch.randn(2, 2, 1, 4, generator=draw)
            append(cache, row, token)
            rows[number] = (row, torch.cat([dense, token], 2))
        assert all(torch.equal(content(row), dense) for row, dense in rows)
        readers = Counter(page for row, _ in rows for page in row.pages)
        assert UNUSED not in readers
        assert cache.tokens == len(readers) * PAGE_TOKENS
    for row, _ in rows:
        cache.remove(row)
    assert cache.tokens == 0
    cache.release_memory()
    assert cache.allocated_tokens == 0


def test_rows_of_one_prompt_take_its_pages_once() -> None:
    cache = PagedCache(SHAPE, 0)
    first = insert(cache, torch.randn(2, 2, 5 * PAGE_TOKENS + 3, 4))
    group = [first, *(cache.copy(first) for _ in range(15))]
    assert cache.tokens == 6 * PAGE_TOKENS
    for row in group:
        append(cache, row, torch.randn(2, 2, 1, 4))
    assert cache.tokens == (5 + 16) * PAGE_TOKENS <= paged_tokens(5 * PAGE_TOKENS + 3, 16, 1)
    assert torch.equal(group[3].copy_from(70)[0], content(group[3])[:, :, 70:])


def test_full_cache_refuses_pages_to_rows_that_grow() -> None:
    cache = PagedCache(SHAPE, FIRST_PAGES * PAGE_TOKENS)
    rows = [insert(cache, torch.zeros(2, 2, PAGE_TOKENS, 4)) for _ in range(FIRST_PAGES - 1)]
    with pytest.raises(CacheFull, match="no free page"):
        cache.ensure_space(rows[0], may_exceed=False)
    before = cache.generation
    cache.ensure_space(rows[0], may_exceed=True)
    assert cache.generation == before + 1


def test_failed_insert_leaves_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PrefilledPrompt, "write", fail)
    cache = PagedCache(SHAPE, 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        insert(cache, torch.zeros(2, 2, 3, 4))
    assert cache.tokens == 0
