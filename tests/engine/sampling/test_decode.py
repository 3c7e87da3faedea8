"""A step's attention: each row over its own past, and the stem that several begin with read once for all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.engine.sampling.test_kv_cache import SHAPE, read
from tinsmith.engine.sampling.decode import DecodeAttention
from tinsmith.engine.sampling.kv_cache import CacheRow, KVCache


def compare(rows: list[CacheRow], pasts: list[Tensor]) -> None:
    """One step of two layers against the definition; `pasts` [1, heads, N, width] are the rows' keys and values."""
    query, new = torch.randn(1, 4, len(rows), 4), torch.randn(1, 2, len(rows), 4)
    lengths = [row.length for row in rows]
    context = DecodeAttention(rows)
    for layer in range(2):
        found = context.attend(layer, query, new, new, scale=0.5)
        for number, past in enumerate(pasts):
            keys = torch.cat([past, new[:, :, number : number + 1]], dim=2).repeat_interleave(2, dim=1)
            scores = (query[:, :, number : number + 1] @ keys.transpose(2, 3) * 0.5).softmax(dim=-1)
            torch.testing.assert_close(found[:, number], (scores @ keys)[:, :, 0])
    context.advance()
    assert [row.length for row in rows] == [length + 1 for length in lengths]


def test_a_step_looks_at_the_row_s_own_past_and_its_new_token() -> None:
    torch.manual_seed(0)
    cache = KVCache(SHAPE)
    pasts = [torch.randn(1, 2, length, 4) for length in (3, 200, 7)]
    compare([cache.insert(read([(past, past)] * 2), past.shape[2]) for past in pasts], pasts)


def test_rows_that_begin_with_the_same_read_their_stem() -> None:
    torch.manual_seed(0)
    cache = KVCache(SHAPE)
    one, two, three, four = (torch.randn(1, 2, length, 4) for length in (80, 20, 9, 200))
    long, short, wide = (
        cache.insert_shared_prefix(read([(part, part)] * 2), readers)
        for part, readers in ((one, 2), (two, 2), (four, 4))
    )
    rows = [cache.insert_after(long, 64), cache.insert(read([(three, three)] * 2), 64), cache.insert_after(short, 64)]
    rows += [
        cache.insert_after(wide, 64),
        cache.insert_after(long, 64),
        cache.insert_after(wide, 64),
        cache.insert_after(short, 128),
        cache.insert_after(wide, 64),
    ]
    assert [row.position for row in rows] == [80, 9, 20, 200, 80, 200, 20, 200]
    pasts = [one, three, two, four, one, four, two, four]
    compare(rows, pasts)
    rows = [cache.ensure_space(row) for row in rows]
    assert [row.position for row in rows] == [81, 10, 21, 201, 81, 201, 21, 201]
    cache.remove(rows.pop(0))
    del pasts[0]
    for row in rows:  # as they were: what the last step added is another token for each
        row.length -= 1
    compare(rows, pasts)


def test_numbers_of_one_row_that_are_not_finite_reach_no_other() -> None:
    torch.manual_seed(0)
    cache = KVCache(SHAPE)
    prompts = [torch.randn(1, 2, length, 4) for length in (80, 300)]
    stems = [cache.insert_shared_prefix(read([(part, part)] * 2), 2) for part in prompts]
    rows = [cache.insert_after(stem, 64) for stem in (*stems, *stems)]
    query, new = torch.randn(1, 4, 4, 4), torch.randn(1, 2, 4, 4)
    wanted = [DecodeAttention(rows).attend(layer, query, new, new, scale=0.5) for layer in range(2)]
    query[:, :, 1::2] = new[:, :, 1::2] = float("nan")
    for layer in range(2):
        found = DecodeAttention(rows).attend(layer, query, new, new, scale=0.5)
        torch.testing.assert_close(found[:, ::2], wanted[layer][:, ::2])
        assert bool(found[:, 1::2].isnan().all())


def test_a_row_behind_a_stem_gives_its_whole_past() -> None:
    torch.manual_seed(0)
    cache = KVCache(SHAPE)
    prompt = torch.randn(1, 2, 70, 4)
    rows = [cache.insert_after(cache.insert_shared_prefix(read([(prompt, prompt)] * 2), 1), 64)]
    query, new = torch.randn(1, 4, 1, 4), torch.randn(1, 2, 1, 4)
    context = DecodeAttention(rows)
    for layer in range(2):
        context.attend(layer, query, new, new, scale=0.5)
    context.advance()
    whole = torch.cat([prompt, new], dim=2)[0]
    for first in (0, 50, 70):
        for found in rows[0].copy_from(first):
            torch.testing.assert_close(found, whole[:, first:].expand(2, -1, -1, -1))


def test_a_stem_leaves_with_the_last_that_reads_it() -> None:
    cache = KVCache(SHAPE)
    prompt = torch.randn(1, 2, 70, 4)
    stem = cache.insert_shared_prefix(read([(prompt, prompt)] * 2), 3)
    rows = [cache.insert_after(stem, 64) for _ in range(3)]
    rows[0].length = 64
    rows[0] = cache.ensure_space(rows[0], remaining=100)
    assert (rows[0].position, rows[0].bank.capacity, stem.readers) == (134, 128, 3)
    assert cache.tokens == 96 + 128 + 64 + 64
    for row in rows:
        assert stem.bank.rows == [stem]
        cache.remove(row)
    assert cache.tokens == 0
