"""Packing does not change the results of a row: random rows and adapters against the oracle in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.data import datum_for, tokens_of
from tests.engine.inspection import gradients_of
from tests.engine.reference import assert_same
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, PassResult

SPECS = (
    LoraSpec(rank=4, seed=1),
    LoraSpec(rank=7, seed=2, train_unembed=False),
    LoraSpec(rank=4, seed=3),
)

ROW = st.tuples(st.integers(0, 60), st.integers(1, 70), st.booleans())
"""Tokens of the common text that a row begins with, how many are its own, and whether it has a gradient."""
REQUEST = st.tuples(
    st.integers(0, len(SPECS) - 1),
    st.sampled_from(["cross_entropy", "importance_sampling", "ppo"]),
    st.lists(ROW, min_size=1, max_size=6),
)


def without_gradient(datum: Datum) -> Datum:
    name = "weights" if "weights" in datum.inputs else "advantages"
    return replace(datum, inputs={**datum.inputs, name: np.zeros(len(datum.tokens), np.float32)})


def request_of(model_id: str, loss_fn: str, rows: list[tuple[int, int, bool]], draw: np.random.Generator) -> Pass:
    text = tokens_of(np.random.default_rng(0), 60)
    data = []
    for shared, own, trained in rows:
        tokens = np.append(text[:shared], tokens_of(draw, own)).astype(np.int32)
        datum = datum_for(loss_fn, draw, len(tokens), tokens)
        data.append(datum if trained else without_gradient(datum))
    return Pass(model_id=model_id, data=tuple(data), loss_fn=loss_fn)


@pytest.mark.parametrize(("kind", "pass_tokens"), [("llama", 24), ("llama", 96), ("llama", 1024), ("qwen3", 256)])
def test_packing_changes_no_logprob_and_no_gradient(kind: str, pass_tokens: int, pair: Any, wait: Any):
    models = [pair(kind=kind, lora=lora, pass_tokens=pass_tokens) for lora in SPECS]
    engine = models[0][0]

    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(st.lists(REQUEST, min_size=1, max_size=4), st.integers(0, 2**16))
    def check(drawn: list[Any], seed: int) -> None:
        for _, model_id, oracle in models:  # forget the gradients of the last example, which may have failed
            wait(engine.step(model_id, AdamParams(learning_rate=0.0)))
            for parameter in oracle.parameters.values():
                parameter.grad = None
        draw = np.random.default_rng(seed)
        passes = [request_of(models[which][1], loss_fn, rows, draw) for which, loss_fn, rows in drawn]
        for (which, _, _), request, result in zip(drawn, passes, wait(engine.run(passes)), strict=True):
            assert isinstance(result, PassResult), result
            oracle = models[which][2]
            loss, logprobs = oracle.loss(request)
            if any(datum.inputs.get("weights", datum.inputs.get("advantages")).any() for datum in request.data):
                loss.backward()
            for actual, wanted in zip(result.logprobs, logprobs, strict=True):
                # Relative too: logprobs are as low as -12, where float32 numbers are 1e-6 apart.
                np.testing.assert_allclose(actual, wanted.detach().numpy(), rtol=4e-6, atol=1e-5)
        for _, model_id, oracle in models:
            assert_same(gradients_of(engine, model_id), oracle.gradients())

    check()
