"""Attention of a decoding step, over each sequence's own row and its shared prefix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.cpu.processor import each_kind
from tests.engine.sampling.test_kv_cache import SHAPE, prefilled
from tinsmith.engine.cpu import calls, openmp
from tinsmith.engine.model.attention import packed_attention
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.packing import PackedRow, pack
from tinsmith.engine.sampling import decode
from tinsmith.engine.sampling.decode import AttentionFunction, DecodeAttention, attention_function
from tinsmith.engine.sampling.kv_cache import CacheRow, KVCache


@pytest.fixture(params=["products", "compiled"])
def function(request: pytest.FixtureRequest) -> AttentionFunction | None:
    """The compiled function, or None for products."""
    if request.param == "products":
        return None
    compiled = attention_function(SHAPE)
    assert compiled is not None
    return compiled


def assert_attention(rows: list[CacheRow], pasts: list[Tensor], function: AttentionFunction | None) -> None:
    """Compare a step of two layers with the definition; `pasts` [1, heads, N, width] are the rows' keys and values."""
    query, new = torch.randn(1, 4, len(rows), 4), torch.randn(1, 2, len(rows), 4)
    lengths = [row.length for row in rows]
    context = DecodeAttention(rows, function)
    for layer in range(2):
        result = context.attend(layer, query, new, new, AttentionRule(0.5))
        for number, past in enumerate(pasts):
            keys = torch.cat([past, new[:, :, number : number + 1]], dim=2).repeat_interleave(2, dim=1)
            scores = (query[:, :, number : number + 1] @ keys.transpose(2, 3) * 0.5).softmax(dim=-1)
            torch.testing.assert_close(result[:, number], (scores @ keys)[:, :, 0])
    context.advance()
    assert [row.length for row in rows] == [length + 1 for length in lengths]


def test_decode_attends_to_own_row_and_new_token(function: AttentionFunction | None) -> None:
    torch.manual_seed(0)
    cache = KVCache(SHAPE)
    pasts = [torch.randn(1, 2, length, 4) for length in (3, 200, 7)]
    assert_attention([cache.insert(prefilled([(past, past)] * 2), past.shape[2]) for past in pasts], pasts, function)


def test_decode_reads_shared_prefixes(function: AttentionFunction | None) -> None:
    torch.manual_seed(0)
    cache = KVCache(SHAPE)
    first, second, third, fourth = (torch.randn(1, 2, length, 4) for length in (80, 20, 9, 200))
    long, short, large = (
        cache.insert_shared_prefix(prefilled([(part, part)] * 2), readers)
        for part, readers in ((first, 2), (second, 2), (fourth, 4))
    )
    rows = [
        cache.insert_after(long, 64),
        cache.insert(prefilled([(third, third)] * 2), 64),
        cache.insert_after(short, 64),
    ]
    rows += [
        cache.insert_after(large, 64),
        cache.insert_after(long, 64),
        cache.insert_after(large, 64),
        cache.insert_after(short, 128),
        cache.insert_after(large, 64),
    ]
    assert [row.position for row in rows] == [80, 9, 20, 200, 80, 200, 20, 200]
    pasts = [first, third, second, fourth, first, fourth, second, fourth]
    assert_attention(rows, pasts, function)
    rows = [cache.ensure_space(row) for row in rows]
    assert [row.position for row in rows] == [81, 10, 21, 201, 81, 201, 21, 201]
    cache.remove(rows.pop(0))
    del pasts[0]
    for row in rows:  # undo the last step, whose token differs in each row
        row.length -= 1
    assert_attention(rows, pasts, function)


def test_nan_in_one_row_does_not_reach_others(function: AttentionFunction | None) -> None:
    torch.manual_seed(0)
    cache = KVCache(SHAPE)
    prompts = [torch.randn(1, 2, length, 4) for length in (80, 300)]
    prefixes = [cache.insert_shared_prefix(prefilled([(part, part)] * 2), 2) for part in prompts]
    rows = [cache.insert_after(prefix, 64) for prefix in (*prefixes, *prefixes)]
    query, new = torch.randn(1, 4, 4, 4), torch.randn(1, 2, 4, 4)
    expected = [
        DecodeAttention(rows, function).attend(layer, query, new, new, AttentionRule(0.5)) for layer in range(2)
    ]
    query[:, :, 1::2] = new[:, :, 1::2] = float("nan")
    for layer in range(2):
        actual = DecodeAttention(rows, function).attend(layer, query, new, new, AttentionRule(0.5))
        torch.testing.assert_close(actual[:, ::2], expected[layer][:, ::2])
        assert bool(actual[:, 1::2].isnan().all())


def test_row_with_shared_prefix_copies_its_whole_past(function: AttentionFunction | None) -> None:
    torch.manual_seed(0)
    cache = KVCache(SHAPE)
    prompt = torch.randn(1, 2, 70, 4)
    rows = [cache.insert_after(cache.insert_shared_prefix(prefilled([(prompt, prompt)] * 2), 1), 64)]
    query, new = torch.randn(1, 4, 1, 4), torch.randn(1, 2, 1, 4)
    context = DecodeAttention(rows, function)
    for layer in range(2):
        context.attend(layer, query, new, new, AttentionRule(0.5))
    context.advance()
    whole = torch.cat([prompt, new], dim=2)[0]
    for first in (0, 50, 70):
        for result in rows[0].copy_from(first):
            torch.testing.assert_close(result, whole[:, first:].expand(2, -1, -1, -1))


def test_shared_prefix_is_freed_with_its_last_reader() -> None:
    cache = KVCache(SHAPE)
    prompt = torch.randn(1, 2, 70, 4)
    prefix = cache.insert_shared_prefix(prefilled([(prompt, prompt)] * 2), 3)
    rows = [cache.insert_after(prefix, 64) for _ in range(3)]
    rows[0].length = 64
    rows[0] = cache.ensure_space(rows[0], remaining=100)
    assert (rows[0].position, rows[0].bank.capacity, prefix.readers) == (134, 128, 3)
    assert cache.tokens == 96 + 128 + 64 + 64
    for row in rows:
        assert prefix.bank.rows == [prefix]
        cache.remove(row)
    assert cache.tokens == 0


KINDS = {
    "bfloat16": replace(SHAPE, dtype=torch.bfloat16),
    "other width of values": replace(SHAPE, key_width=9, value_width=5),
    "latents": replace(SHAPE, heads=1, key_width=9, value_width=0, latent_width=7),
    "whole vectors": replace(SHAPE, key_width=64, value_width=32),
    "whole vectors of bfloat16": replace(SHAPE, key_width=48, value_width=80, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("group", [2, 5])
@pytest.mark.parametrize("window", [None, 3, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_are_what_products_compute(kind: str, window: int | None, group: int) -> None:
    torch.manual_seed(0)
    shape, cache = KINDS[kind], KVCache(KINDS[kind])
    rule = AttentionRule(shape.key_width**-0.5, window=window)

    def tokens(count: int) -> tuple[Tensor, Tensor]:
        sizes = (1, shape.heads, count)
        keys, values = (torch.randn(*sizes, width).to(shape.dtype) for width in (shape.key_width, shape.value_width))
        return keys, values

    prefix = cache.insert_shared_prefix(prefilled([tokens(20)] * 2), 2)
    rows = [
        cache.insert_after(prefix, 64),
        cache.insert(prefilled([tokens(40)] * 2), 64),
        cache.insert_after(prefix, 64),
    ]
    for _ in range(3):
        query = torch.randn(1, group * shape.heads, 3, shape.key_width).to(shape.dtype)
        key, value = tokens(3)
        value = key[..., : shape.latent_width] if shape.latent_width else value
        contexts = [DecodeAttention(rows, compiled) for compiled in (None, attention_function(shape))]
        for layer in range(2):
            expected, actual = (context.attend(layer, query, key, value, rule).float() for context in contexts)
            tolerance = 1e-5 if shape.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
        contexts[1].advance()


@each_kind
@pytest.mark.parametrize("window", [None, 6, 31])
@pytest.mark.parametrize("prefix", [1, 20, 33])
@pytest.mark.parametrize(("heads", "widths"), [((2, 2), (64, 64)), ((6, 2), (16, 80)), ((5, 1), (128, 32))])
def test_decoded_token_has_the_bits_of_any_packed_pass(
    heads: tuple[int, int],
    widths: tuple[int, int],
    prefix: int,
    window: int | None,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of rows that share a prefix, in one pass, each in a pass of its own, and decoded token by token."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    for module in (decode, calls):
        monkeypatch.setattr(module, "kind_of", lambda _: kind)
    draw, cpu = np.random.default_rng(0), torch.device("cpu")
    torch.manual_seed(0)
    shared = draw.integers(0, 99, prefix)
    rows = [
        PackedRow(key=key, adapter=0, tokens=np.array([*shared, 100 + key, *draw.integers(0, 99, own)], np.int32))
        for key, own in enumerate((6, 17, 40, 1))
    ]
    tree, rule = pack(rows), AttentionRule(widths[0] ** -0.5, window=window)
    query, key, value = (
        torch.randn(1, count, len(tree.tokens), width).to(dtype)
        for count, width in zip((heads[0], heads[1], heads[1]), (widths[0], *widths), strict=True)
    )
    packed = packed_attention(tree, dtype, cpu, compiled=True).attend(0, query, key, value, rule)
    shape = replace(SHAPE, layers=1, heads=heads[1], key_width=widths[0], value_width=widths[1], dtype=dtype)
    cache, paths = KVCache(shape), [tree.index[row.key] for row in rows]
    for row, path in zip(rows, paths, strict=True):
        alone = packed_attention(pack([row]), dtype, cpu, compiled=True)
        assert torch.equal(
            alone.attend(0, query[:, :, path], key[:, :, path], value[:, :, path], rule), packed[:, path]
        )
    past = [tensor[:, :, paths[0][:prefix]] for tensor in (key, value)]
    start = cache.insert_shared_prefix(prefilled([(past[0], past[1])]), len(rows))
    cached = [cache.insert_after(start, 64) for _ in rows]
    for step in range(prefix, min(map(len, paths[:3]))):
        at = [path[step] for path in paths if step < len(path)]
        if len(at) < len(cached):
            cache.remove(cached.pop())
        context = DecodeAttention(cached, attention_function(shape))
        output = context.attend(0, query[:, :, at], key[:, :, at], value[:, :, at], rule)
        context.advance()
        assert torch.equal(output, packed[:, at])


@pytest.mark.parametrize("rule", [AttentionRule(0.5, softcap=2.0), AttentionRule(0.5, sinks=torch.zeros(4))])
def test_compiled_steps_leave_other_rules_to_products(rule: AttentionRule) -> None:
    rows = [KVCache(SHAPE).insert(prefilled([(torch.randn(1, 2, 5, 4),) * 2] * 2), 64)]
    query, new = torch.randn(1, 4, 1, 4), torch.randn(1, 2, 1, 4)
    expected = DecodeAttention(rows).attend(0, query, new, new, rule)
    torch.testing.assert_close(DecodeAttention(rows, refuse).attend(0, query, new, new, rule), expected)


def test_long_prefix_of_many_rows_is_read_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bfloat16 is widened."""
    monkeypatch.setattr(decode, "kind_of", lambda _: "bfloat16")
    cache = KVCache(SHAPE)
    prefix = cache.insert_shared_prefix(prefilled([(torch.randn(1, 2, 20, 4),) * 2] * 2), 3)
    rows = [cache.insert_after(prefix, 64) for _ in range(3)]
    query, new = torch.randn(1, 4, 3, 4), torch.randn(1, 2, 3, 4)
    read_again = 2 * 20 * SHAPE.heads * (SHAPE.key_width + SHAPE.value_width)
    monkeypatch.setattr(decode, "MAX_PREFIX_NUMBERS", read_again)
    with pytest.raises(ZeroDivisionError):
        DecodeAttention(rows, refuse).attend(0, query, new, new, AttentionRule(0.5))
    monkeypatch.setattr(decode, "MAX_PREFIX_NUMBERS", read_again - 1)
    DecodeAttention(rows, refuse).attend(0, query, new, new, AttentionRule(0.5))


@pytest.mark.parametrize("threads", [1, 3])
def test_compiled_step_in_several_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(decode, "THREAD_NUMBERS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cache = KVCache(SHAPE)
    pasts = [torch.randn(1, 2, length, 4) for length in (5, 70, 3)]
    rows = [cache.insert(prefilled([(past, past)] * 2), past.shape[2]) for past in pasts]
    assert_attention(rows, pasts, attention_function(SHAPE))


def test_without_libgomp_one_thread_computes_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_library", lambda: None)
    test_compiled_step_in_several_threads(3, monkeypatch)


def refuse(*_: object) -> None:
    """A function that cannot compute anything."""
    raise ZeroDivisionError
