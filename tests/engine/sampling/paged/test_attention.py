"""Attention over pages: the banks' numbers, a row's own whatever the batch, and the kernel like PyTorch's operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.sampling.test_kv_cache import SHAPE, prefilled
from tests.engine.triton_programs import needs_triton, run_python
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.sampling.decode import DecodeAttention
from tinsmith.engine.sampling.kv_cache import KVCache
from tinsmith.engine.sampling.paged.attention import PagedAttention, attend_gathered
from tinsmith.engine.sampling.paged.pages import PagedCache

RULES = st.builds(
    AttentionRule,
    scale=st.just(0.5),
    window=st.sampled_from([None, 1, 7, 64, 100]),
    softcap=st.sampled_from([None, 5.0]),
    sinks=st.sampled_from([None, torch.tensor([0.5, -1.0, 3.0, 0.0])]),
)


@given(st.lists(st.sampled_from([1, 3, 63, 64, 65, 200]), min_size=1, max_size=4), RULES, st.integers(0, 99))
def test_pages_equal_banks(lengths: list[int], rule: AttentionRule, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    pasts = [torch.randn(1, 2, length, 4, generator=draw) for length in lengths]
    prompts = [prefilled([(past, past + 1)] * 2) for past in pasts]
    banks, pages = KVCache(SHAPE), PagedCache(SHAPE, 0)
    in_banks = [banks.insert(prompt, prompt.length + 3) for prompt in prompts]
    in_pages = [pages.insert(prompt) for prompt in prompts]
    for _ in range(3):
        expected = DecodeAttention(in_banks)
        actual = PagedAttention.of_rows(pages, attend_gathered, in_pages)
        query = torch.randn(1, 4, len(pasts), 4, generator=draw)
        new = torch.randn(1, 2, len(pasts), 4, generator=draw)
        for layer in range(2):
            left, right = (context.attend(layer, query, new, new, rule) for context in (actual, expected))
            torch.testing.assert_close(left, right, rtol=1e-6, atol=2e-6)
        actual.advance()
        expected.advance()


def test_nan_after_a_row_does_not_reach_it() -> None:
    cache = PagedCache(SHAPE, 0)
    past = torch.randn(1, 2, 70, 4)
    row = cache.insert(prefilled([(past, past)] * 2))
    for layer in (*cache.keys, *cache.values):
        layer[row.pages[1], :, 7:] = float("nan")
    query, new = torch.randn(1, 4, 1, 4), torch.randn(1, 2, 1, 4)
    context = PagedAttention.of_rows(cache, attend_gathered, [row])
    assert bool(context.attend(0, query, new, new, AttentionRule(0.5)).isfinite().all())


INTERPRETED = """
import torch
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.sampling.paged import attention_kernel, choice
from tinsmith.engine.sampling.paged.attention import attend_gathered
choice.check(attention_kernel.attend_in_place, torch.device("cpu"), torch.float32)
draw = torch.Generator().manual_seed(0)
for query_heads, heads, width, value_width, dtype in ((4, 4, 20, 12, torch.float32), (8, 1, 16, 16, torch.float16)):
    keys, values = (torch.randn(12, heads, 64, size, generator=draw).to(dtype) for size in (width, value_width))
    query = torch.randn(3, query_heads, width, generator=draw).to(dtype)
    tables = torch.stack([torch.randperm(11, generator=draw)[:9] + 1 for _ in range(3)]).int()
    lengths = torch.tensor([1, 520, 65])
    rule = AttentionRule(0.25, window=90)
    rows = attention_kernel.attend_in_place(query, keys, values, tables, lengths, rule)
    expected = attend_gathered(query, keys, values, tables, lengths, rule)
    torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-5 if dtype == torch.float32 else 1e-3)
    narrow = tables[2:, :2].contiguous()
    alone = attention_kernel.attend_in_place(query[2:], keys, values, narrow, lengths[2:], rule)
    assert torch.equal(alone[0], rows[2])
"""
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from tinsmith.engine.sampling.paged import attention_kernel as kernels
pointers = {"sums": "*fp32", "tops": "*fp32", "totals": "*fp32"}
def compiled(function, names, constants, capability):
    signature = {**names, **dict.fromkeys(constants, "constexpr")}
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
for capability in (80, 90):
    for width, group, block, window, cap in ((128, 4, 64, 0, 0.0), (512, 2, 32, 1024, 50.0)):
        sizes = {"VALUE_WIDTH": width, "VALUE_BLOCK": width, "SPLITS": 8}
        names = {**dict.fromkeys(("query", "keys", "values"), "*bf16"), "tables": "*i32", "lengths": "*i64", **pointers}
        constants = {"TABLE_STRIDE": 64, "HEADS": 8, "GROUP": group, "GROUP_BLOCK": 16, "WIDTH": width, "PAGE": 64,
                     "WIDTH_BLOCK": width, "WINDOW": window, "SOFTCAP": cap, "BLOCK": block, "SPLIT": kernels.SPLIT}
        part = compiled(kernels.attend_part, {**names, "scale": "fp32"}, constants | sizes, capability)
        assert part.metadata.shared <= 96 << 10
        names = {**pointers, "sinks": "*bf16", "output": "*bf16"}
        compiled(kernels.combine_parts, names, {"HEADS": 32, "HAS_SINKS": cap > 0, **sizes}, capability)
"""


@needs_triton
@pytest.mark.parametrize(
    ("program", "interpret"), [(INTERPRETED, True), (COMPILED, False)], ids=["interpreted", "compiled"]
)
def test_kernel_equals_operators_and_compiles(program: str, interpret: bool) -> None:
    run_python("-c", program, interpret=interpret)
