"""Banks of keys and values: who leaves, who moves up, and what the others keep."""

from dataclasses import replace

import torch

from tinsmith.engine.sampling.capacity import MIN_CAPACITY, row_capacity
from tinsmith.engine.sampling.kv_cache import BANK_TOKENS, CacheRow, CacheShape, KVCache
from tinsmith.engine.sampling.prefill import KVSegment, PrefilledPrompt

SHAPE = CacheShape(layers=2, heads=2, width=4, dtype=torch.float32, device=torch.device("cpu"))


def inserted(cache: KVCache, length: int, value: float, room: int = 0) -> CacheRow:
    device = cache._shape.device
    keys = [torch.full((1, 2, length, 4), value + layer, device=device) for layer in range(2)]
    return cache.insert(read([(one, one) for one in keys]), room or length)


def read(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> PrefilledPrompt:
    """A prompt all of which was in the pass."""
    return PrefilledPrompt(torch.zeros(1), (KVSegment(None, 0, kept[0][0].shape[2]),), kept)


def content(row: CacheRow) -> torch.Tensor:
    return row.bank.keys[:, row.index, :, : row.length]


def holds(row: CacheRow, value: float) -> bool:
    return all(bool((content(row)[layer] == value + layer).all()) for layer in range(2))


def test_rows_keep_their_content_when_others_leave() -> None:
    cache = KVCache(SHAPE)
    rows = [inserted(cache, 5 + number, 10.0 * number) for number in range(6)]
    for gone in (0, 3, 5):
        cache.remove(rows[gone])
    assert [row.index for row in rows[0].bank.rows] == [0, 1, 2]
    assert all(holds(rows[number], 10.0 * number) for number in (1, 2, 4))


def test_a_row_that_is_full_moves_to_the_next_bank() -> None:
    cache = KVCache(SHAPE)
    stays, grows = inserted(cache, 3, 1.0), inserted(cache, MIN_CAPACITY, 2.0)
    moved = cache.ensure_space(grows)
    assert moved.bank.capacity == MIN_CAPACITY // 2 * 3
    assert holds(moved, 2.0)
    assert cache.ensure_space(stays) is stays
    assert cache.tokens == MIN_CAPACITY + MIN_CAPACITY // 2 * 3


def test_capacities_leave_at_most_a_third_idle() -> None:
    for length in range(MIN_CAPACITY, 9000):
        assert length <= row_capacity(length) < 1.5 * length + 1


def test_an_empty_bank_gives_its_memory_back() -> None:
    cache = KVCache(SHAPE)
    row = inserted(cache, 3, 1.0)
    cache.remove(row)
    assert cache._banks == []
    assert cache.tokens == 0


def test_a_full_bank_is_followed_by_another() -> None:
    cache = KVCache(SHAPE)
    rows = [inserted(cache, BANK_TOKENS // 2, float(number)) for number in range(5)]
    assert len({id(row.bank) for row in rows}) == 3
    cache.remove(rows[0])
    rows[0] = inserted(cache, BANK_TOKENS // 2 - 1, 9.0)
    assert len({id(row.bank) for row in rows}) == 3
    assert all(holds(row, value) for row, value in zip(rows, (9.0, 1.0, 2.0, 3.0, 4.0), strict=True))
    assert len({id(inserted(cache, 2 * BANK_TOKENS, 7.0).bank), id(inserted(cache, 2 * BANK_TOKENS, 8.0).bank)}) == 2


def test_what_a_row_has_not_written_is_finite() -> None:
    bank = inserted(KVCache(SHAPE), 3, 1.0).bank
    assert bool((bank.keys[:, 0, :, 3:] == 0).all())
    assert bool((bank.values[:, 0, :, 3:] == 0).all())


def taken(cache: KVCache) -> int:
    """Tokens of memory that all banks have."""
    return sum(bank.keys.shape[1] * bank.keys.shape[3] for bank in cache._banks)


def test_where_memory_is_taken_at_once_banks_have_little_more_than_their_rows() -> None:
    """`meta` stands for a GPU: sequences of many lengths, a group that comes at once and moves up, and many singles."""
    shape = replace(SHAPE, device=torch.device("meta"))
    cache = KVCache(shape, 65536)
    rows = [inserted(cache, length, 1.0) for length in (50, 70, 130, 300, 700, 1500, 3000, 6000)]
    assert taken(cache) == cache.tokens
    prompt = torch.empty(1, 2, 200, 4, device="meta")
    first = cache.insert(read([(prompt, prompt)] * 2), 256, arriving=16)
    group = [first, *(cache.copy(first) for _ in range(15))]
    assert len({id(row.bank) for row in group}) == 1
    assert taken(cache) == cache.tokens
    for row in group:
        row.length = 256
    group = [cache.ensure_space(row, remaining=1000) for row in group]
    assert len({id(row.bank) for row in group}) == 1
    assert taken(cache) == cache.tokens
    single = [inserted(cache, 40, 1.0) for _ in range(100)]
    assert len({id(row.bank) for row in single}) <= 8
    assert taken(cache) <= 2 * cache.tokens
    assert all(bank.max_rows * bank.capacity <= max(BANK_TOKENS, bank.capacity) for bank in cache._banks)
    for row in (*rows, *group, *single):
        cache.remove(row)
    assert taken(cache) == 0


def test_what_others_have_left_is_cleared() -> None:
    """Numbers that are not finite too, and the token of a step that was never finished."""
    cache, nan = KVCache(SHAPE), float("nan")
    rows = [inserted(cache, length, value, MIN_CAPACITY) for length, value in ((9, nan), (3, 1.0), (8, nan), (5, nan))]
    bank = rows[0].bank
    for row in rows:
        bank.keys[:, row.index, :, row.length] = bank.values[:, row.index, :, row.length] = nan
    for number in (0, 2, 3):
        cache.remove(rows[number])
    assert bank.rows == [rows[1]]
    assert holds(rows[1], 1.0)
    taken = [inserted(cache, 2, 4.0, MIN_CAPACITY) for _ in range(3)]
    for row in (rows[1], *taken):
        behind = row.length + (row is rows[1])  # its own next token goes there before anyone looks
        assert bool((bank.keys[:, row.index, :, behind:] == 0).all())
        assert bool((bank.values[:, row.index, :, behind:] == 0).all())


def test_a_copy_goes_its_own_way() -> None:
    cache = KVCache(SHAPE)
    first = inserted(cache, 3, 1.0)
    second = cache.copy(first)
    second.bank.keys[:, second.index] = 9.0
    assert holds(first, 1.0)
    assert second.length == 3
