"""Rows and banks of the KV cache."""

from dataclasses import replace

import torch

from tinsmith.engine.sampling.capacity import MIN_CAPACITY, row_capacity
from tinsmith.engine.sampling.kv_cache import BANK_TOKENS, CacheRow, CacheShape, KVCache
from tinsmith.engine.sampling.prefill import PrefilledPrompt
from tinsmith.engine.sampling.prefixes.attention import KVSegment

SHAPE = CacheShape(layers=2, heads=2, key_width=4, value_width=4, dtype=torch.float32, device=torch.device("cpu"))


def insert(cache: KVCache, length: int, value: float, min_capacity: int = 0) -> CacheRow:
    device = cache.shape.device
    keys = [torch.full((1, 2, length, 4), value + layer, device=device) for layer in range(2)]
    return cache.insert(prefilled([(layer, layer) for layer in keys]), min_capacity or length)


def prefilled(pass_kv: list[tuple[torch.Tensor, torch.Tensor]]) -> PrefilledPrompt:
    """A prompt whose tokens were all in the prefill pass."""
    return PrefilledPrompt(torch.zeros(1), (KVSegment(None, 0, pass_kv[0][0].shape[2]),), pass_kv)


def content(row: CacheRow) -> torch.Tensor:
    return row.bank.keys[:, row.index, :, : row.length]


def has_value(row: CacheRow, value: float) -> bool:
    return all(bool((content(row)[layer] == value + layer).all()) for layer in range(2))


def test_rows_keep_content_when_others_are_removed() -> None:
    cache = KVCache(SHAPE)
    rows = [insert(cache, 5 + number, 10.0 * number) for number in range(6)]
    for removed in (0, 3, 5):
        cache.remove(rows[removed])
    assert [row.index for row in rows[0].bank.rows] == [0, 1, 2]
    assert all(has_value(rows[number], 10.0 * number) for number in (1, 2, 4))


def test_full_row_moves_to_a_larger_one() -> None:
    cache = KVCache(SHAPE)
    stays, grows = insert(cache, 3, 1.0), insert(cache, MIN_CAPACITY, 2.0)
    moved = cache.ensure_space(grows)
    assert moved.bank.capacity == MIN_CAPACITY // 2 * 3
    assert has_value(moved, 2.0)
    assert cache.ensure_space(stays) is stays
    assert cache.tokens == MIN_CAPACITY + MIN_CAPACITY // 2 * 3


def test_row_capacity_leaves_at_most_a_third_unused() -> None:
    for length in range(MIN_CAPACITY, 9000):
        assert length <= row_capacity(length) < 1.5 * length + 1


def test_empty_bank_is_freed() -> None:
    cache = KVCache(SHAPE)
    row = insert(cache, 3, 1.0)
    cache.remove(row)
    assert cache._banks == []
    assert cache.tokens == 0


def test_full_bank_is_followed_by_another() -> None:
    cache = KVCache(SHAPE)
    rows = [insert(cache, BANK_TOKENS // 2, float(number)) for number in range(5)]
    assert len({id(row.bank) for row in rows}) == 3
    cache.remove(rows[0])
    rows[0] = insert(cache, BANK_TOKENS // 2 - 1, 9.0)
    assert len({id(row.bank) for row in rows}) == 3
    assert all(has_value(row, value) for row, value in zip(rows, (9.0, 1.0, 2.0, 3.0, 4.0), strict=True))
    assert len({id(insert(cache, 2 * BANK_TOKENS, 7.0).bank), id(insert(cache, 2 * BANK_TOKENS, 8.0).bank)}) == 2


def test_unwritten_tokens_of_a_row_are_zero() -> None:
    bank = insert(KVCache(SHAPE), 3, 1.0).bank
    assert bool((bank.keys[:, 0, :, 3:] == 0).all())
    assert bool((bank.values[:, 0, :, 3:] == 0).all())


def allocated(cache: KVCache) -> int:
    """Tokens for which memory is allocated in all banks."""
    return sum(bank.keys.shape[1] * bank.keys.shape[3] for bank in cache._banks)


def test_gpu_banks_allocate_little_more_than_their_rows() -> None:
    """`meta` stands for a GPU: sequences of many lengths, a group that arrives at once and grows, and many singles."""
    shape = replace(SHAPE, device=torch.device("meta"))
    cache = KVCache(shape, 65536)
    rows = [insert(cache, length, 1.0) for length in (50, 70, 130, 300, 700, 1500, 3000, 6000)]
    assert allocated(cache) == cache.tokens
    prompt = torch.empty(1, 2, 200, 4, device="meta")
    first = cache.insert(prefilled([(prompt, prompt)] * 2), 256, arriving=16)
    group = [first, *(cache.copy(first) for _ in range(15))]
    assert len({id(row.bank) for row in group}) == 1
    assert allocated(cache) == cache.tokens
    for row in group:
        row.length = 256
    group = [cache.ensure_space(row, remaining=1000) for row in group]
    assert len({id(row.bank) for row in group}) == 1
    assert allocated(cache) == cache.tokens
    single = [insert(cache, 40, 1.0) for _ in range(100)]
    assert len({id(row.bank) for row in single}) <= 8
    assert allocated(cache) <= 2 * cache.tokens
    assert all(bank.max_rows * bank.capacity <= max(BANK_TOKENS, bank.capacity) for bank in cache._banks)
    for row in (*rows, *group, *single):
        cache.remove(row)
    assert allocated(cache) == 0


def test_reused_rows_are_cleared() -> None:
    """Also of NaN, and of the token of an unfinished step."""
    cache, nan = KVCache(SHAPE), float("nan")
    rows = [insert(cache, length, value, MIN_CAPACITY) for length, value in ((9, nan), (3, 1.0), (8, nan), (5, nan))]
    bank = rows[0].bank
    for row in rows:
        bank.keys[:, row.index, :, row.length] = bank.values[:, row.index, :, row.length] = nan
    for number in (0, 2, 3):
        cache.remove(rows[number])
    assert bank.rows == [rows[1]]
    assert has_value(rows[1], 1.0)
    allocated = [insert(cache, 2, 4.0, MIN_CAPACITY) for _ in range(3)]
    for row in (rows[1], *allocated):
        end = row.length + (row is rows[1])  # the row's next token is written there before it is read
        assert bool((bank.keys[:, row.index, :, end:] == 0).all())
        assert bool((bank.values[:, row.index, :, end:] == 0).all())


def test_copy_of_a_row_is_independent() -> None:
    cache = KVCache(SHAPE)
    first = insert(cache, 3, 1.0)
    second = cache.copy(first)
    second.bank.keys[:, second.index] = 9.0
    assert has_value(first, 1.0)
    assert second.length == 3
