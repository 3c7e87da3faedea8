"""Several models in one pass: each gets the results that it gets alone, and errors stay with their request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.data import datum_for, pass_for, replace_inputs, tokens_of
from tests.engine.inspection import gradients_of
from tests.engine.reference import assert_same
from tinsmith.engine.base import AdamParams, LoraSpec, Pass, PassResult
from tinsmith.errors import TinsmithError

SPECS = (
    LoraSpec(rank=4, seed=1),
    LoraSpec(rank=7, seed=2, train_unembed=False),
    LoraSpec(rank=1, seed=3, train_attn=False, train_mlp=False),
)


def shared_requests() -> list[Pass]:
    """A request for each spec: different losses and lengths, and a prompt that all share."""
    draw = np.random.default_rng(4)
    prompt, requests = tokens_of(draw, 15), []
    for loss_fn in ("cross_entropy", "ppo", "importance_sampling"):
        rows = [np.append(prompt, tokens_of(draw, length)).astype(np.int32) for length in (3, 8, 3)] + [prompt]
        data = tuple(datum_for(loss_fn, draw, len(row), row) for row in rows)
        requests.append(Pass(model_id="", data=(*data, datum_for(loss_fn, draw, 6)), loss_fn=loss_fn))
    return requests


def test_models_together_match_each_alone(pair: Any, wait: Any):
    models = [pair(lora=lora) for lora in SPECS]
    engine = models[0][0]
    requests = [replace(r, model_id=name) for r, (_, name, _) in zip(shared_requests(), models, strict=True)]
    alone, gradients = [], []
    for request in requests:
        alone += wait(engine.run([request]))
        gradients.append(gradients_of(engine, request.model_id))
        wait(engine.step(request.model_id, AdamParams(learning_rate=0.0)))  # forget the gradient
    together = wait(engine.run(requests))
    for request, actual, wanted, gradient in zip(requests, together, alone, gradients, strict=True):
        assert actual.metrics["loss:sum"] == pytest.approx(wanted.metrics["loss:sum"], rel=1e-5)
        for left, right in zip(actual.logprobs, wanted.logprobs, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)
        assert_same(gradients_of(engine, request.model_id), gradient, tolerance=1e-5)


def test_models_together_match_oracle(pair: Any, wait: Any):
    models = [pair(lora=lora) for lora in SPECS]
    requests = [replace(r, model_id=name) for r, (_, name, _) in zip(shared_requests(), models, strict=True)]
    for request, result, (engine, name, oracle) in zip(requests, wait(models[0][0].run(requests)), models, strict=True):
        (loss,) = oracle.backward(request)
        assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
        assert_same(gradients_of(engine, name), oracle.gradients())


def test_step_of_one_model_leaves_others_unchanged(pair: Any, wait: Any):
    (engine, first, _), (_, second, oracle) = pair(lora=SPECS[0]), pair(lora=SPECS[0])
    request = pass_for("cross_entropy", first)
    wait(engine.run([request, replace(request, model_id=second)]))
    before = gradients_of(engine, second)
    wait(engine.step(first, AdamParams(learning_rate=0.1)))
    assert_same(gradients_of(engine, second), before, tolerance=0)
    (result,) = wait(engine.run([replace(request, model_id=second, forward_only=True)]))
    for actual, wanted in zip(result.logprobs, oracle.logprobs(request.data), strict=True):
        np.testing.assert_allclose(actual, wanted.detach().numpy(), atol=1e-5)


def test_many_models_in_one_pass_match_oracle(pair: Any, wait: Any):
    models = [pair(lora=LoraSpec(rank=1 + index % 5, seed=index)) for index in range(12)]
    requests = [pass_for("cross_entropy", name, seed=index) for index, (_, name, _) in enumerate(models)]
    results = wait(models[0][0].run(requests))
    for request, result, (engine, name, oracle) in zip(requests, results, models, strict=True):
        assert isinstance(result, PassResult)
        oracle.backward(request)
        assert_same(gradients_of(engine, name), oracle.gradients())


@pytest.mark.parametrize(
    "lengths", [(16,) * 9, (5, 16, 15, 1, 2, 14, 16, 13, 16), (9,) * 4 + (250,) + (3,) * 5], ids=str
)
def test_batched_small_adapters_match_each_alone(lengths: tuple[int, ...], pair: Any, wait: Any):
    models = [pair(lora=LoraSpec(rank=3, seed=9)) for _ in lengths]
    requests = [
        pass_for("cross_entropy", name, seed=seed, lengths=(length,), forward_only=seed == 2)
        for seed, (length, (_, name, _)) in enumerate(zip(lengths, models, strict=True))
    ]
    engine = models[0][0]
    alone = [wait(engine.run([replace(request, forward_only=True)]))[0] for request in requests]
    for request, actual, single, (_, name, oracle) in zip(
        requests, wait(engine.run(requests)), alone, models, strict=True
    ):
        np.testing.assert_allclose(actual.logprobs[0], single.logprobs[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(
            actual.logprobs[0], oracle.logprobs(request.data)[0].detach().numpy(), rtol=1e-5, atol=1e-5
        )
        if not request.forward_only:
            oracle.backward(request)
            assert_same(gradients_of(engine, name), oracle.gradients())


def bad_requests(model_id: str) -> dict[str, Pass]:
    good = pass_for("importance_sampling", model_id)
    overflow, huge_gradient = (
        [replace_inputs(datum, logprobs=np.full(len(datum.tokens), q, np.float32)) for datum in good.data]
        for q in (-9e4, -200.0)
    )
    return {
        "no such model": replace(good, model_id="nobody"),
        "no such loss": replace(good, loss_fn="nothing"),
        "a loss without its inputs": replace(pass_for("cross_entropy", model_id), loss_fn="ppo"),
        "a token beyond the vocabulary": replace(
            good, data=(replace(good.data[0], tokens=np.full_like(good.data[0].tokens, 4000)),)
        ),
        "a loss that overflows": replace(good, data=tuple(overflow)),
        "a gradient that overflows": replace(good, data=tuple(huge_gradient)),
    }


@pytest.mark.parametrize("fault", bad_requests("m"))
def test_failing_request_fails_alone(fault: str, pair: Any, wait: Any):
    (engine, first, oracle), (_, second, other) = pair(lora=SPECS[0]), pair(lora=SPECS[1])
    good, fine = pass_for("cross_entropy", first, seed=1), pass_for("ppo", second, seed=2)
    results = wait(engine.run([good, bad_requests(second)[fault], fine]))
    assert [isinstance(result, TinsmithError) for result in results] == [False, True, False], results
    oracle.backward(good)
    other.backward(fine)
    assert_same(gradients_of(engine, first), oracle.gradients())
    assert_same(gradients_of(engine, second), other.gradients())


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("fault", ["a loss that overflows", "a gradient that overflows"])
def test_failed_request_leaves_gradients_unchanged(before: int, fault: str, pair: Any, wait: Any):
    engine, model_id, _ = pair(pass_tokens=32)
    bad, good = bad_requests(model_id)[fault], pass_for("importance_sampling", model_id, lengths=(31, 30))
    wait(engine.run([pass_for("cross_entropy", model_id)] * before))
    start = gradients_of(engine, model_id)
    (result,) = wait(engine.run([replace(bad, data=(*good.data, *bad.data))]))
    assert isinstance(result, TinsmithError)
    assert_same(gradients_of(engine, model_id), start, tolerance=0)
    wait(engine.step(model_id, AdamParams(learning_rate=0.0)))
    assert not any(gradient.any() for gradient in gradients_of(engine, model_id).values())


def test_error_survives_pickling(engine: Any, wait: Any):
    import pickle

    (error,) = wait(engine.run([pass_for("ppo", "nobody")]))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
