"""Entropy and KL terms, returned entropies and trinity_ppo, against autograd in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.data import LOSSES, datum_for, pass_for, replace_inputs, tokens_of
from tests.engine.inspection import gradients_of
from tests.engine.reference import assert_same
from tests.engine.training.test_trainer import assert_agrees
from tests.models import KINDS
from tinsmith.engine.base import Datum, LoraSpec, Pass, PassResult

TERMED = [name for name in LOSSES if name != "trinity_ppo"]


def with_reference(request: Pass, seed: int = 3, **inputs: float) -> Pass:
    """The request with reference logprobs in every datum, and constant inputs."""
    draw = np.random.default_rng(seed)
    data = []
    for datum in request.data:
        more = {name: np.full(len(datum.tokens), value, np.float32) for name, value in inputs.items()}
        reference = draw.normal(-6, 1, len(datum.tokens)).astype(np.float32)
        data.append(replace_inputs(datum, ref_logprobs=reference, **more))
    return replace(request, data=tuple(data))


@pytest.mark.parametrize("flags", [(True, True, True), (True, False, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_entropy_term_of_every_loss_matches_oracle(loss_fn: str, flags: Any, pair: Any, wait: Any):
    lora = LoraSpec(rank=4, seed=1, train_attn=flags[0], train_mlp=flags[1], train_unembed=flags[2])
    assert_agrees(pair(lora=lora), wait, pass_for(loss_fn, config={"entropy_coef": 0.7}))


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_term_alone_matches_oracle_on_every_base_model(kind: str, pair: Any, wait: Any):
    request = pass_for("importance_sampling", config={"entropy_coef": -1.5})
    data = [
        replace_inputs(
            datum,
            advantages=np.zeros(len(datum.tokens), np.float32),
            entropy_mask=np.random.default_rng(1).normal(size=len(datum.tokens)).astype(np.float32),
        )
        for datum in request.data
    ]
    assert_agrees(pair(kind), wait, replace(request, data=tuple(data)))


def test_entropy_of_shared_prompt_counts_for_each_datum(pair: Any, wait: Any):
    draw = np.random.default_rng(8)
    prompt = tokens_of(draw, 17)
    rows = [np.concatenate([prompt, tokens_of(draw, length)]) for length in (5, 3, 9, 1)]
    data = tuple(
        replace_inputs(datum_for("ppo", draw, len(row), row), entropy_mask=np.ones(len(row), np.float32))
        for row in rows
    )
    requests = [Pass(model_id="", data=data, loss_fn="ppo", loss_config={"entropy_coef": 0.3})]
    requests.append(replace(requests[0], loss_config={"entropy_coef": 2.0}))
    requests.append(pass_for("ppo", seed=9))  # one without the term in the same micro-batch
    assert_agrees(pair(), wait, *requests)
    assert_agrees(pair(pass_tokens=24), wait, *requests)


def test_entropy_metric_with_coefficient_zero_in_mixed_pass(pair: Any, wait: Any):
    engine, model_id, _ = pair(pass_tokens=24)
    watched, bonus = (pass_for("ppo", model_id, config={"entropy_coef": coef}) for coef in (0.0, 0.5))
    plain = pass_for("ppo", model_id)
    ((alone,), (wanted,), mixed) = (
        wait(engine.run(passes)) for passes in ([watched], [bonus], [watched, bonus, plain])
    )
    for actual in (alone, mixed[0], mixed[1]):
        assert actual.metrics["entropy:sum"] == pytest.approx(wanted.metrics["entropy:sum"], rel=1e-6)
    assert alone.metrics["loss:sum"] == pytest.approx(mixed[2].metrics["loss:sum"], rel=1e-6)
    assert "entropy:sum" not in mixed[2].metrics


def test_entropy_with_several_targets_per_position(pair: Any, wait: Any):
    draw = np.random.default_rng(3)
    weights = draw.normal(size=(9, 3)).astype(np.float32)
    weights[:4] = 0.0
    datum = Datum(tokens=tokens_of(draw, 9), targets=draw.integers(0, 512, (9, 3)), inputs={"weights": weights})
    request = Pass(model_id="", data=(datum,), loss_fn="cross_entropy", loss_config={"entropy_coef": 0.5})
    assert_agrees(pair(), wait, request)
    assert_agrees(pair(), wait, replace(request, data=(replace_inputs(datum, entropy_mask=np.ones(9, np.float32)),)))


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_entropies_are_returned_for_every_position(loss_fn: str, pair: Any, wait: Any):
    engine, model_id, oracle = pair()
    request = pass_for(loss_fn, model_id, config={"return_entropy": 1.0})
    for variant in (request, replace(request, forward_only=True)):
        (result,) = wait(engine.run([variant]))
        assert isinstance(result, PassResult)
        assert result.entropies is not None
        for actual, wanted in zip(result.entropies, oracle.entropies(request.data), strict=True):
            assert actual.dtype == np.float32
            np.testing.assert_allclose(actual, wanted, rtol=1e-5)
    (plain,) = wait(engine.run([pass_for(loss_fn, model_id)]))
    assert plain.entropies is None
    assert plain.metrics["loss:sum"] == pytest.approx(result.metrics["loss:sum"], rel=1e-6)


def test_entropy_metric_is_the_sum_of_the_term(pair: Any, wait: Any):
    engine, model_id, oracle = pair()
    request = pass_for("ppo", model_id, config={"entropy_coef": 0.25})
    (plain, termed) = wait(engine.run([pass_for("ppo", model_id), request]))
    entropies = oracle.entropies(request.data)
    wanted = sum(
        float(entropy[datum.inputs["advantages"] != 0].sum())
        for entropy, datum in zip(entropies, request.data, strict=True)
    )
    assert termed.metrics["entropy:sum"] == pytest.approx(wanted, rel=1e-5)
    assert termed.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"] - 0.25 * wanted, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", None])
@pytest.mark.parametrize("loss_fn", TERMED)
def test_kl_term_of_every_loss_and_estimator_matches_oracle(loss_fn: str, estimator: str | None, pair: Any, wait: Any):
    config: dict[str, float | str] = {"kl_coef": 0.4, **({"kl_estimator": estimator} if estimator else {})}
    request = with_reference(pass_for(loss_fn, config=config))
    assert_agrees(pair(), wait, request)
    assert_agrees(pair(), wait, with_reference(request, kl_mask=1.0), with_reference(request, kl_mask=-0.5))


def test_kl_mask_adds_gradient_without_advantage(pair: Any, wait: Any):
    request = pass_for("importance_sampling", config={"kl_coef": 1.0})
    data = [replace_inputs(datum, advantages=np.zeros(len(datum.tokens), np.float32)) for datum in request.data]
    still = with_reference(replace(request, data=tuple(data)))
    engine, model_id, _ = pair()
    wait(engine.run([replace(still, model_id=model_id)]))
    assert all((gradient == 0).all() for gradient in gradients_of(engine, model_id).values())
    wait(engine.run([replace(with_reference(still, kl_mask=1.0), model_id=model_id)]))
    assert any((gradient != 0).any() for gradient in gradients_of(engine, model_id).values())


def test_kl_is_zero_against_own_logprobs_and_not_negative(pair: Any, wait: Any):
    engine, model_id, _ = pair()
    request = pass_for("ppo", model_id, forward_only=True)
    (result,) = wait(engine.run([request]))
    data = tuple(
        replace_inputs(datum, ref_logprobs=own) for datum, own in zip(request.data, result.logprobs, strict=True)
    )
    for estimator in ("k1", "k2", "k3"):
        config = {"kl_coef": 1.0, "kl_estimator": estimator}
        (same,) = wait(engine.run([replace(request, data=data, loss_config=config)]))
        assert same.metrics["kl:sum"] == pytest.approx(0.0, abs=1e-4)
        assert same.metrics["loss:sum"] == pytest.approx(result.metrics["loss:sum"], abs=1e-3)
        (other,) = wait(engine.run([replace(with_reference(request), loss_config=config)]))
        assert estimator == "k1" or other.metrics["kl:sum"] > 1.0


def test_masked_reference_logprobs_do_not_overflow(pair: Any, wait: Any):
    request = with_reference(pass_for("ppo", config={"kl_coef": 0.5, "kl_estimator": "k3"}))
    data = [
        replace_inputs(d, ref_logprobs=np.where(d.inputs["advantages"] == 0, 9e4, d.inputs["ref_logprobs"]))
        for d in request.data
    ]
    assert_agrees(pair(), wait, replace(request, data=tuple(data)))


@pytest.mark.parametrize(
    "config", [{}, {"kl_coef": 0.0}, {"clip_range": 0.05, "clip_ratio_c": 1.1}, {"num_total_datums": 64}]
)
def test_trinity_ppo_matches_oracle(config: dict[str, float], pair: Any, wait: Any):
    assert_agrees(pair(), wait, pass_for("trinity_ppo", config=config), pass_for("trinity_ppo", seed=4, config=config))


def test_trinity_ppo_metrics_are_sums_over_its_mask(pair: Any, wait: Any):
    engine, model_id, oracle = pair()
    request = pass_for("trinity_ppo", model_id)
    (result,) = wait(engine.run([request]))
    sums = dict.fromkeys(("response_tokens", "ratio_sum", "ratio_squared_sum", "clipped_tokens", "kl_sum"), 0.0)
    for p, datum in zip(oracle.logprobs(request.data), request.data, strict=True):
        lp, inputs = p.detach().numpy(), datum.inputs
        for t in np.flatnonzero(inputs["weights"]):
            ratio, a = np.exp(lp[t] - inputs["logprobs"][t]), inputs["advantages"][t]
            sums["response_tokens"] += 1
            sums["ratio_sum"] += ratio
            sums["ratio_squared_sum"] += ratio**2
            sums["clipped_tokens"] += -a * np.clip(ratio, 0.8, 1.2) > -a * ratio
            sums["kl_sum"] += 0.5 * (lp[t] - inputs["ref_logprobs"][t]) ** 2
    del result.metrics["loss:sum"]
    assert result.metrics == pytest.approx({f"trinity/{name}:sum": value for name, value in sums.items()}, rel=1e-4)


def test_chunks_of_trinity_ppo_add_up(pair: Any, wait: Any):
    whole, parts = pair(), pair()
    request = pass_for("trinity_ppo")
    wait(whole[0].run([replace(request, model_id=whole[1])]))
    for piece in (request.data[:1], request.data[1:]):
        wait(parts[0].run([replace(request, model_id=parts[1], data=piece)]))
    assert_same(gradients_of(parts[0], parts[1]), gradients_of(whole[0], whole[1]))
