"""FlexAttention after cached prefixes gives what the calls prompt by prompt give, in one call a layer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torchs

from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model import flex_attention, loading, packing
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.sampling.prefill import Prompt, prefill_pass
from tinsmith.engine.sampling.prefixes.attention import PrefixAttention
from tinsmith.engine.sampling.prefixes.cache import PrefixCache

LAYERS, HEADS, SHARED, WIDTH = 2, 4, 2, 8
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.fixture(scope="module")
def base(tiny_llama: Path) -> BaseModel:
    return loading.load(EngineConfig(source=str(tiny_llama), dtype="float32", device="cpu"))


@pytest.fixture(autouse=True, scope="module")
def uncompiled() -> Any:
    """Run FlexAttention uncompiled, on a CPU."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that it is not compiled
        patch.setattr(torchs, "_validate_device", lambda *_: None)
        patch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


def cache_of(rows: Sequence[np.ndarray], draw: torch.Generator) -> PrefixCache:
    """Random keys and values of these rows, which share those of common prefixes."""
    cache = PrefixCache()
    for row in rows:
        kv = torch.randn(2, LAYERS, SHARED, len(row), WIDTH, generator=draw)
        cache.add(("", 0, ""), row, lambda first, kv=kv: (kv[0, :, :, first:], kv[1, :, :, first:]))
    return cache


def prompts_after(cache: PrefixCache, rows: Sequence[np.ndarray], adapters: Sequence[int]) -> list[Prompt]:
    """A prompt for each row; those of adapter 0 continue what is cached."""
    prompts = []
    for key, (row, adapter) in enumerate(zip(rows, adapters, strict=True)):
        first_hidden = len(row) - 1 - key % 2 * (len(row) // 2)  # every second one needs hidden states of its prompt
        match = cache.match(("", 0, "" if adapter == 0 else "other"), row, first_hidden)
        packed = packing.PackedRow(key=key, adapter=adapter, tokens=row)
        prompts.append(Prompt(row=packed, match=match, first_hidden=first_hidden))
    return prompts


def outputs(base: BaseModel, prompts: Sequence[Prompt], rules: Sequence[AttentionRule], kind: type) -> torch.Tensor:
    """Attention of the pass's positions with random inputs, in a layer for each rule."""
    inputs = prefill_pass(prompts, base)
    context: Any = inputs.context
    draw = torch.Generator().manual_seed(0)
    assert isinstance(inputs.context, kind)
    results = []
    for layer, rule in enumerate(rules):
        query, key, value = (
            torch.randn(1, n, len(inputs.tokens), WIDTH, generator=draw) for n in (HEADS, SHARED, SHARED)
        )
        results.append(context.attend(layer % LAYERS, query, key, value, rule))
        assert context.saved_kv[-1][0] is key
    return torch.stack(results)


rows_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=7)


@given(
    cached=rows_of, rows=rows_of, split=st.integers(0, 7), window=st.integers(1, 50), repeats=st.sampled_from([1, 9])
)
@settings(deadline=None, max_examples=60)
def test_flex_equals_calls_by_prompt(
    base: BaseModel, cached: list[list[int]], rows: list[list[int]], split: int, window: int, repeats: int
):
    """Rows that continue one another, several rows after one prefix, prompts without one, two tenants, windows."""
    stored, wanted = ([np.repeat(np.array(row, np.int32), repeats) for row in lists] for lists in (cached, rows))
    cache = cache_of(stored, torch.Generator().manual_seed(1))
    prompts = prompts_after(cache, wanted, [int(number >= split) for number in range(len(wanted))])
    if not any(prompt.match.path for prompt in prompts):
        return
    rules = [AttentionRule(0.3), AttentionRule(0.3, window, 5.0), AttentionRule(0.2, window, sinks=SINKS)]
    expected = outputs(base, prompts, rules, PrefixAttention)
    actual = outputs(replace(base, flex_attention=True), prompts, rules, flex_attention.FlexAttention)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_one_call_a_layer_and_one_mask_a_window(base: BaseModel, monkeypatch: pytest.MonkeyPatch):
    rows = [np.array([0, *([number] * (200 + number)), 3, 4], np.int32) for number in range(20)]
    prompts = prompts_after(cache_of([row[:-2] for row in rows], torch.Generator()), rows, [0] * len(rows))
    calls = Mock(wraps=flex_attention.flex_attention)
    masks = Mock(wraps=flex_attention.BlockMask.from_kv_blocks)
    monkeypatch.setattr(flex_attention, "flex_attention", calls)
    monkeypatch.setattr(flex_attention.BlockMask, "from_kv_blocks", masks)
    rules = [AttentionRule(0.3), AttentionRule(0.3, 50)] * 3
    outputs(replace(base, flex_attention=True), prompts, rules, flex_attention.FlexAttention)
    assert calls.call_count == len(rules)
    assert masks.call_count == 2
    keys = [call.args[1].shape[2] for call in calls.call_args_list]
    assert keys[1] < 0.6 * keys[0]  # keys that no query has in its window are not gathered


def test_latents_are_computed_by_prompt(base: BaseModel):
    rows = [np.arange(40, dtype=np.int32)]
    prompts = prompts_after(cache_of([rows[0][:-2]], torch.Generator()), rows, [0])
    with_latents = replace(base, flex_attention=True, latent_width=24)
    assert isinstance(prefill_pass(prompts, with_latents).context, PrefixAttention)
