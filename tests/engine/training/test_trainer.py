"""Logprobs, losses, gradients and AdamW steps against the oracle, for every loss, flag and base model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.data import CONFIGS, LOSSES, datum_for, pass_for, replace_inputs, tokens_of
from tests.engine.inspection import gradients_of, weights_of
from tests.engine.reference import assert_same
from tests.models import KINDS
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, PassResult
from tinsmith.errors import TinsmithError

FLAGS = [flags for flags in product((True, False), repeat=3) if any(flags)]
PARTS = ((True, True, True), (True, False, False), (False, False, True))
"""All modules, and those from which the gradient takes another way than from the others."""
SMOOTH = AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, grad_clip_norm=1.0)


def spec(flags: tuple[bool, bool, bool], rank: int = 4) -> LoraSpec:
    return LoraSpec(rank=rank, seed=1, train_attn=flags[0], train_mlp=flags[1], train_unembed=flags[2])


def assert_agrees(trained: tuple[Any, str, Any], wait: Any, *requests: Pass) -> None:
    """Assert that results and gradients of the requests, in one pass, are those of the oracle."""
    engine, model_id, oracle = trained
    requests = tuple(replace(request, model_id=model_id) for request in requests)
    results = wait(engine.run(list(requests)))
    for request, result in zip(requests, results, strict=True):
        assert isinstance(result, PassResult), result
        loss, logprobs = oracle.loss(request)
        grads = torch.autograd.grad(loss, logprobs, retain_graph=True)
        loss.backward()
        # The error of the loss if every logprob is off by 1e-5.
        margin = 1e-5 * (1 + sum(float(grad.abs().sum()) for grad in grads))
        assert result.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=margin)
        assert all(name.count(":") == 1 for name in result.metrics)
        for actual, wanted in zip(result.logprobs, logprobs, strict=True):
            assert actual.dtype == np.float32
            assert actual.shape == tuple(wanted.shape)
            np.testing.assert_allclose(actual, wanted.detach().numpy(), atol=1e-5)
    assert_same(gradients_of(engine, model_id), oracle.gradients())


@pytest.mark.parametrize(
    ("loss_fn", "flags"),
    [("cross_entropy", flags) for flags in FLAGS] + [(loss_fn, flags) for loss_fn in LOSSES[1:] for flags in PARTS],
    ids=str,
)
def test_every_loss_and_choice_of_modules_matches_oracle(
    loss_fn: str, flags: tuple[bool, bool, bool], pair: Any, wait: Any
):
    assert_agrees(pair(lora=spec(flags)), wait, pass_for(loss_fn))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo"])
def test_every_base_model_matches_oracle(loss_fn: str, kind: str, pair: Any, wait: Any):
    assert_agrees(pair(kind), wait, pass_for(loss_fn))


# At rank 1 the usual alpha multiplies by 32, and float32 is 5e-5 from float64 in plain transformers too.
@pytest.mark.parametrize(("rank", "alpha"), [(1, 8.0), (3, 32.0), (32, 32.0), (130, 32.0)])
def test_any_rank_matches_oracle(rank: int, alpha: float, pair: Any, wait: Any):
    assert_agrees(pair(lora=LoraSpec(rank=rank, seed=2, alpha=alpha)), wait, pass_for("cross_entropy"))


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_clips_of_request_and_of_tokens_match_oracle(loss_fn: str, pair: Any, wait: Any):
    request = pass_for(loss_fn, config={"clip_low_threshold": 0.6, "clip_high_threshold": 1.7})
    draw = np.random.default_rng(5)
    own = [
        replace_inputs(
            datum,
            clip_low_threshold=draw.uniform(0.2, 1.0, len(datum.tokens)).astype(np.float32),
            clip_high_threshold=draw.uniform(1.0, 3.0, len(datum.tokens)).astype(np.float32),
        )
        for datum in request.data
    ]
    assert_agrees(pair(), wait, request, replace(request, data=(own[0], request.data[1], *own[2:])))


def test_dro_with_own_beta_matches_oracle(pair: Any, wait: Any):
    assert_agrees(pair(), wait, pass_for("dro", config={"beta": 0.3}))


def test_cross_entropy_without_weights_matches_oracle(pair: Any, wait: Any):
    data = tuple(Datum(tokens=datum.tokens, targets=datum.targets) for datum in pass_for("cross_entropy").data)
    assert_agrees(pair(), wait, Pass(model_id="", data=data, loss_fn="cross_entropy"))


def test_several_targets_per_position_match_oracle(pair: Any, wait: Any):
    draw = np.random.default_rng(3)
    data = []
    for length, targets in ((11, 3), (1, 5), (6, 1)):
        weights = draw.normal(size=(length, targets)).astype(np.float32)
        weights[0] = 0.0
        ids = draw.integers(0, 512, (length, targets))
        data.append(Datum(tokens=tokens_of(draw, length), targets=ids, inputs={"weights": weights}))
    assert_agrees(pair(), wait, Pass(model_id="", data=tuple(data), loss_fn="cross_entropy"))


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_masked_positions_with_absurd_logprobs_match_oracle(loss_fn: str, pair: Any, wait: Any):
    request = pass_for(loss_fn)
    data = [
        replace_inputs(d, logprobs=np.where(d.inputs["advantages"] == 0, np.float32(-9e4), d.inputs["logprobs"]))
        for d in request.data
    ]
    assert_agrees(pair(), wait, replace(request, data=tuple(data)))


def test_request_without_gradient_returns_logprobs(pair: Any, wait: Any):
    request = pass_for("importance_sampling")
    data = [replace_inputs(datum, advantages=np.zeros(len(datum.tokens), np.float32)) for datum in request.data]
    assert_agrees(pair(), wait, replace(request, data=tuple(data)))


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (1024,), (2, 1023)], ids=str)
def test_shortest_and_longest_sequences_match_oracle(lengths: tuple[int, ...], pair: Any, wait: Any):
    assert_agrees(pair(), wait, pass_for("cross_entropy", lengths=lengths))


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prompts_of_a_group_match_oracle(kind: str, pair: Any, wait: Any):
    draw = np.random.default_rng(8)
    prompt, other = tokens_of(draw, 17), tokens_of(draw, 12)
    rows = [np.concatenate([prompt, tokens_of(draw, length)]) for length in (5, 3, 9, 1)]
    rows += [np.concatenate([other, tokens_of(draw, length)]) for length in (4, 6)]
    data = tuple(datum_for("importance_sampling", draw, len(row), row) for row in rows)
    assert_agrees(pair(kind), wait, Pass(model_id="", data=data, loss_fn="importance_sampling"))


def test_equal_rows_and_prefixes_match_oracle(pair: Any, wait: Any):
    draw = np.random.default_rng(9)
    row = tokens_of(draw, 20)
    rows = [row, row, row[:7], row[:1], np.append(row, row), row[:19], np.append(row[:7], tokens_of(draw, 5))]
    data = tuple(datum_for("cross_entropy", draw, len(row), row.astype(np.int32)) for row in rows)
    assert_agrees(pair(), wait, Pass(model_id="", data=data, loss_fn="cross_entropy"))


def test_long_rows_with_long_shared_prompt_match_oracle(pair: Any, wait: Any):
    """Longer than any block of an attention kernel, before and after the branch."""
    draw = np.random.default_rng(12)
    prompt = tokens_of(draw, 600)
    rows = [np.append(prompt, tokens_of(draw, length)) for length in (300, 1, 130)] + [prompt[:513]]
    data = tuple(datum_for("cross_entropy", draw, len(row), row.astype(np.int32)) for row in rows)
    assert_agrees(pair(), wait, Pass(model_id="", data=data, loss_fn="cross_entropy"))


@pytest.mark.parametrize("seed", range(8))
def test_random_rows_over_few_tokens_match_oracle(seed: int, pair: Any, wait: Any):
    draw = np.random.default_rng(seed)
    requests = []
    for loss_fn in draw.choice(LOSSES, 3):
        rows = [draw.integers(5, 7, int(draw.integers(1, 40)), dtype=np.int32) for _ in range(int(draw.integers(1, 9)))]
        data = tuple(datum_for(loss_fn, draw, len(row), row) for row in rows)
        requests.append(Pass(model_id="", data=data, loss_fn=str(loss_fn), loss_config=CONFIGS.get(str(loss_fn), {})))
    assert_agrees(pair(pass_tokens=48), wait, *requests)


def test_request_of_several_micro_batches_matches_oracle(pair: Any, wait: Any):
    draw = np.random.default_rng(10)
    prompt = tokens_of(draw, 30)
    lengths = draw.integers(1, 40, 24)
    rows = [np.concatenate([prompt[: draw.integers(0, 31)], tokens_of(draw, int(length))]) for length in lengths]
    data = tuple(datum_for("ppo", draw, len(row), row) for row in rows)
    assert_agrees(pair(pass_tokens=64), wait, Pass(model_id="", data=data, loss_fn="ppo"))


def test_gspo_ratio_is_the_same_in_several_micro_batches(pair: Any, wait: Any):
    assert_agrees(pair(pass_tokens=32), wait, pass_for("gspo", lengths=(31, 7, 100, 12, 3)))


def test_gradients_add_up_over_requests_and_passes(pair: Any, wait: Any):
    trained = pair()
    assert_agrees(trained, wait, pass_for("cross_entropy", seed=1))
    assert_agrees(trained, wait, pass_for("ppo", seed=2), pass_for("cispo", seed=3), pass_for("cross_entropy", seed=1))


def test_forward_only_gives_same_results_without_gradients(pair: Any, wait: Any):
    engine, model_id, _ = pair()
    request = pass_for("ppo", model_id)
    (trained,) = wait(engine.run([request]))
    before = gradients_of(engine, model_id)
    (looked,) = wait(engine.run([replace(request, forward_only=True)]))
    assert looked.metrics["loss:sum"] == pytest.approx(trained.metrics["loss:sum"], rel=1e-6)
    for actual, wanted in zip(looked.logprobs, trained.logprobs, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-6)
    assert_same(gradients_of(engine, model_id), before, tolerance=0)


def test_forward_only_and_training_of_one_model_in_one_pass(pair: Any, wait: Any):
    engine, model_id, oracle = pair()
    looked, trained = pass_for("ppo", model_id, seed=1, forward_only=True), pass_for("ppo", model_id, seed=2)
    results = wait(engine.run([looked, trained]))
    assert results[0].metrics["loss:sum"] == pytest.approx(float(oracle.loss(looked)[0].detach()), rel=1e-5)
    oracle.backward(trained)
    assert_same(gradients_of(engine, model_id), oracle.gradients())


@pytest.mark.parametrize(
    "adam",
    [
        SMOOTH,
        AdamParams(),
        AdamParams(learning_rate=3e-3, beta1=0.0, beta2=0.0, eps=1e-2),
        AdamParams(learning_rate=1e-3, beta1=0.95, beta2=0.999, eps=1e-8, weight_decay=0.5),
        AdamParams(learning_rate=1e-3, eps=1e-8, grad_clip_norm=0.01),
        AdamParams(learning_rate=0.0, weight_decay=0.1),
    ],
    ids=["all six", "defaults", "no memory", "decay", "clipped", "no rate"],
)
def test_adamw_steps_match_torch(adam: AdamParams, pair: Any, wait: Any, tmp_path: Any):
    engine, model_id, oracle = pair()
    for count in range(3):
        before = oracle.weights()
        request = pass_for("cross_entropy", model_id, seed=count)
        wait(engine.run([request]))
        oracle.backward(request)
        metrics = wait(engine.step(model_id, adam))
        assert metrics["grad_norm"] == pytest.approx(oracle.step(adam), rel=1e-4)
        actual, wanted = weights_of(engine, model_id, wait, tmp_path / str(count)), oracle.weights()
        assert_same(actual, wanted, tolerance=1e-5)
        moved = {name: wanted[name] - before[name] for name in wanted}
        assert_same({name: actual[name] - before[name] for name in actual}, moved, tolerance=5e-3)


def test_adam_params_may_change_between_steps(pair: Any, wait: Any, tmp_path: Any):
    engine, model_id, oracle = pair()
    for count, adam in enumerate((SMOOTH, replace(SMOOTH, beta1=0.5, beta2=0.99), replace(SMOOTH, learning_rate=1e-3))):
        request = pass_for("cross_entropy", model_id, seed=count)
        wait(engine.run([request]))
        oracle.backward(request)
        wait(engine.step(model_id, adam))
        oracle.step(adam)
    assert_same(weights_of(engine, model_id, wait, tmp_path), oracle.weights(), tolerance=1e-5)


def test_step_clears_gradient_and_next_step_uses_momentum(pair: Any, wait: Any, tmp_path: Any):
    engine, model_id, oracle = pair()
    request = pass_for("cross_entropy", model_id)
    wait(engine.run([request]))
    oracle.backward(request)
    for _ in range(2):
        wait(engine.step(model_id, SMOOTH))
        oracle.step(SMOOTH)
    assert all((gradient == 0).all() for gradient in gradients_of(engine, model_id).values())
    assert_same(weights_of(engine, model_id, wait, tmp_path), oracle.weights(), tolerance=1e-5)


def test_step_before_any_gradient_succeeds(engine: Any, model_id: str, wait: Any):
    wait(engine.create(model_id, LoraSpec(rank=2, seed=0)))
    assert wait(engine.step(model_id, AdamParams()))["grad_norm"] == 0.0


def test_same_pass_twice_gives_identical_results(pair: Any, wait: Any):
    engine, model_id, _ = pair()
    request = pass_for("ppo", model_id, forward_only=True)
    first, second = wait(engine.run([request])), wait(engine.run([request]))
    for left, right in zip(first[0].logprobs, second[0].logprobs, strict=True):
        np.testing.assert_array_equal(left, right)


def test_missing_model_is_a_tinsmith_error(engine: Any, wait: Any):
    (result,) = wait(engine.run([pass_for("ppo", "nobody")]))
    assert isinstance(result, TinsmithError)
    with pytest.raises(TinsmithError):
        wait(engine.step("nobody", AdamParams()))
