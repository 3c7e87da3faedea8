"""Cumulative sums without the operator that GPUs have no deterministic kernel for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.data import pass_for
from tests.engine.sampling.helpers import sample_request
from tinsmith.engine.base import AdamParams, LoraSpec
from tinsmith.engine.model import precision
from tinsmith.engine.sampling import token_sampling

SHAPES = [((3, 700), 1), ((2, 64, 5), 1), ((2, 4, 64, 1), 2), ((1, 70_000), 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_sums_on_a_cpu_have_the_bits_of_torch(shape: tuple[int, ...], dim: int, dtype: torch.dtype):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    assert torch.equal(precision.cumulative_sum(values, dim), values.cumsum(dim))


@pytest.mark.parametrize("length", [1, 255, 256, 257, 70_000])
def test_sums_by_products_are_exact_to_rounding(length: int):
    values = torch.rand((2, length), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(precision._by_products(values), values.cumsum(1), rtol=1e-13, atol=0)


def test_no_token_of_probability_zero_is_drawn(monkeypatch: pytest.MonkeyPatch):
    """As sums by products may be: each off by a rounding error, so that they rise at terms of 0."""
    probs = torch.zeros(1, 1000)
    probs[0, [300, 301, 700]] = torch.tensor([0.25, 0.5, 0.25])

    def uneven(values: torch.Tensor, dim: int = 1) -> torch.Tensor:
        sums = values.double().cumsum(dim)
        return sums + 1e-12 * torch.linspace(-1, 1, values.shape[dim], dtype=torch.float64)

    monkeypatch.setattr(token_sampling, "cumulative_sum", uneven)
    goals = torch.tensor([0.0, 0.25, 0.75, 1 - 2**-53, 1e-13, 0.7499999999999], dtype=torch.float64)
    tokens, _ = token_sampling.invert_cdf(probs, goals, torch.zeros(len(goals), dtype=torch.int64))
    assert set(tokens.tolist()) <= {300, 301, 700}


class NoFloatCumsum(TorchDispatchMode):
    """Raises where a GPU has no deterministic kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::cumsum") and args[0].is_floating_point():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return func(*args, **(kwargs or {}))


def test_engine_trains_and_samples_without_float_cumsum(engine_of: Any, wait: Any, model_id: str):
    engine = engine_of("llama")
    with NoFloatCumsum():
        wait(engine.create(model_id, LoraSpec(rank=4, seed=0)))
        (result,) = wait(engine.run([pass_for("ppo", model_id)]))
        assert not isinstance(result, Exception)
        wait(engine.step(model_id, AdamParams()))
        for extra in ({}, {"top_k": 5, "top_p": 0.9}, {"prompt_logprobs": True, "prompt_alt_tokens_k": 2}):
            assert wait(engine.sample(sample_request(max_tokens=3, **extra))).sequences[0].tokens.size == 3
    wait(engine.drop(model_id))
