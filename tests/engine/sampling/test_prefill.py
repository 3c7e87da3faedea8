"""The pass over prompts of which something is known: what each query sees, and that memory grows with the length."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model import loading, packing
from tinsmith.engine.model.loading import BaseModel
from tinsmith.engine.sampling.prefill import PrefillPass, PrefixAttention, Prompt, prefill_pass
from tinsmith.engine.sampling.prefix_cache import PrefixMatch, PrefixNode

HEADS, SHARED, WIDTH = 4, 2, 24
SCALE = WIDTH**-0.5


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def base(request: pytest.FixtureRequest, tiny_llama: Path) -> BaseModel:
    return loading.load(EngineConfig(source=str(tiny_llama), dtype=request.param, device="cpu"))


def tokens(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 500, length, dtype=np.int32)


def known(beginning: np.ndarray, dtype: torch.dtype) -> PrefixNode:
    """Tokens that were read before; their keys and values are of one layer, and random."""
    keys, values = torch.randn(2, 1, SHARED, len(beginning), WIDTH, generator=torch.Generator().manual_seed(1)).to(
        dtype
    )
    return PrefixNode(beginning, keys, values, None, 0)


def prompt(key: int, row: np.ndarray, run: PrefixNode, count: int, first_hidden: int | None = None) -> Prompt:
    match = PrefixMatch(((run, count),) if count else ())
    return Prompt(
        row=packing.PackedRow(key=key, adapter=0, tokens=row), match=match, first_hidden=first_hidden or len(row) - 1
    )


def test_every_query_sees_what_is_known_and_its_own_past(base: BaseModel) -> None:
    stem = tokens(300, 0)
    run = known(stem, base.dtype)
    rows = [
        np.concatenate([stem, tokens(700, 1)]),  # longer than one piece
        np.concatenate([stem[:200], tokens(150, 2)]),
        np.concatenate([stem, tokens(5, 3)]),
        np.concatenate([stem, tokens(9, 4)]),
        tokens(140, 5),
        stem,
    ]
    counts, needed = (300, 200, 300, 100, 0, 120), (None, None, None, 100, None, 120)
    prompts = [prompt(k, row, run, counts[k], needed[k]) for k, row in enumerate(rows)]
    work = prefill_pass(prompts, base)
    assert isinstance(work.context, PrefixAttention)
    draw = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(1, heads, len(work.tokens), WIDTH, generator=draw).to(base.dtype)
        for heads in (HEADS, SHARED, SHARED)
    )
    output = work.context.attend(0, query, key, value, SCALE)[0].float()
    for one in prompts:
        first = one.first_hidden if one.first_hidden < len(one.row.tokens) - 1 else counts[one.row.key]
        places = work.hidden_index[one.row.key][first:]
        found = expected(work, one, query[0][:, places], key, value)
        torch.testing.assert_close(output[places], found, rtol=0, atol=2e-2 if base.dtype == torch.bfloat16 else 1e-5)


def expected(
    work: PrefillPass, one: Prompt, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attention of a row's last queries over all of the row, by the definition."""
    seen = [segment.in_layer(0, key, value) for segment in work.segments[one.row.key]]
    keys, values = (torch.cat(parts, dim=1).float().repeat_interleave(2, 0) for parts in zip(*seen, strict=True))
    count, length = query.shape[1], keys.shape[1]
    scores = query.float() @ keys.transpose(1, 2) * SCALE
    hidden = torch.ones(count, length).tril(length - count) == 0
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values).transpose(0, 1)


def test_masks_grow_with_the_length_and_not_with_its_square(base: BaseModel) -> None:
    def taken(length: int) -> tuple[int, int]:
        row = tokens(length, 0)
        tracemalloc.start()
        work = prefill_pass([prompt(0, row, known(row[:1], base.dtype), 1)], base)
        _, numpy_peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert isinstance(work.context, PrefixAttention)
        masks = {part.mask.untyped_storage().data_ptr(): part.mask.untyped_storage() for part in work.context.calls}
        return numpy_peak, sum(storage.nbytes() for storage in masks.values())

    short, long = taken(4096), taken(8192)
    assert long[0] < 2.2 * short[0]
    assert long[1] < 2.2 * short[1]
