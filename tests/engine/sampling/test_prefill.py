"""Attention of the prefill pass over partly cached prompts, and the memory of its masks."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model import loading, packing
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.sampling.prefill import PrefillPass, Prompt, prefill_pass
from tinsmith.engine.sampling.prefixes.attention import PrefixAttention
from tinsmith.engine.sampling.prefixes.cache import PrefixMatch, PrefixNode

HEADS, SHARED, WIDTH = 4, 2, 24
SCALE = WIDTH**-0.5


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def base(request: pytest.FixtureRequest, tiny_llama: Path) -> BaseModel:
    return loading.load(EngineConfig(source=str(tiny_llama), dtype=request.param, device="cpu"))


def tokens(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 500, length, dtype=np.int32)


def cached_node(beginning: np.ndarray, dtype: torch.dtype) -> PrefixNode:
    """Cached tokens with random keys and values of one layer."""
    keys, values = torch.randn(2, 1, SHARED, len(beginning), WIDTH, generator=torch.Generator().manual_seed(1)).to(
        dtype
    )
    return PrefixNode(beginning, keys, values, None, 0)


def make_prompt(key: int, row: np.ndarray, node: PrefixNode, count: int, first_hidden: int | None = None) -> Prompt:
    match = PrefixMatch(((node, count),) if count else ())
    return Prompt(
        row=packing.PackedRow(key=key, adapter=0, tokens=row), match=match, first_hidden=first_hidden or len(row) - 1
    )


def test_queries_attend_to_cached_prefix_and_own_past(base: BaseModel) -> None:
    prefix = tokens(300, 0)
    node = cached_node(prefix, base.dtype)
    rows = [
        np.concatenate([prefix, tokens(700, 1)]),  # longer than one call
        np.concatenate([prefix[:200], tokens(150, 2)]),
        np.concatenate([prefix, tokens(5, 3)]),
        np.concatenate([prefix, tokens(9, 4)]),
        tokens(140, 5),
        prefix,
    ]
    counts, needed = (300, 200, 300, 100, 0, 120), (None, None, None, 100, None, 120)
    prompts = [make_prompt(k, row, node, counts[k], needed[k]) for k, row in enumerate(rows)]
    prefill = prefill_pass(prompts, base)
    assert isinstance(prefill.context, PrefixAttention)
    rng = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(1, heads, len(prefill.tokens), WIDTH, generator=rng).to(base.dtype)
        for heads in (HEADS, SHARED, SHARED)
    )
    output = prefill.context.attend(0, query, key, value, AttentionRule(SCALE))[0].float()
    for prompt in prompts:
        first = prompt.first_hidden if prompt.first_hidden < len(prompt.row.tokens) - 1 else counts[prompt.row.key]
        places = prefill.hidden_index[prompt.row.key][first:]
        actual = expected_attention(prefill, prompt, query[0][:, places], key, value)
        torch.testing.assert_close(output[places], actual, rtol=0, atol=2e-2 if base.dtype == torch.bfloat16 else 1e-5)


def expected_attention(
    prefill: PrefillPass, prompt: Prompt, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attention of a row's last queries over the whole row, by the definition."""
    seen = [segment.in_layer(0, key, value) for segment in prefill.segments[prompt.row.key]]
    keys, values = (torch.cat(parts, dim=1).float().repeat_interleave(2, 0) for parts in zip(*seen, strict=True))
    count, length = query.shape[1], keys.shape[1]
    scores = query.float() @ keys.transpose(1, 2) * SCALE
    hidden = torch.ones(count, length).tril(length - count) == 0
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values).transpose(0, 1)


def test_mask_memory_grows_linearly_with_length(base: BaseModel) -> None:
    def allocated(length: int) -> tuple[int, int]:
        row = tokens(length, 0)
        tracemalloc.start()
        prefill = prefill_pass([make_prompt(0, row, cached_node(row[:1], base.dtype), 1)], base)
        assert isinstance(prefill.context, PrefixAttention)
        calls = prefill.context.calls(None)
        _, numpy_peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        storages = [mask.untyped_storage() for _, mask in calls]
        masks = {storage.data_ptr(): storage for storage in storages}
        return numpy_peak, sum(storage.nbytes() for storage in masks.values())

    short, long = allocated(4096), allocated(8192)
    assert long[0] < 2.2 * short[0]
    assert long[1] < 2.2 * short[1]
