"""Each loss as a function of logprobs, in float64, against the oracle's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from tests.engine.data import CONFIGS, LOSSES, RL_LOSSES, datum_for, replace_inputs
from tests.engine.reference import objective
from tinsmith.engine.base import Datum, Pass
from tinsmith.engine.training.loss_specs import LOSSES as SPECS
from tinsmith.engine.training.losses import LOSS_FUNCTIONS

CLIPPED = ("ppo", "cispo", "gspo")
Config = Mapping[str, float]


def engine_loss(p: list[np.ndarray], data: list[Datum], loss_fn: str, config: Config) -> tuple[float, list[np.ndarray]]:
    """The engine's loss over the concatenated data, and its gradient for each datum."""
    flat = torch.tensor(np.concatenate([row.ravel() for row in p]), dtype=torch.float64, requires_grad=True)
    names = data[0].inputs
    inputs = {
        name: torch.tensor(np.concatenate([datum.inputs[name].ravel() for datum in data]), dtype=torch.float64)
        for name in names
    }
    sequence = torch.tensor(np.repeat(np.arange(len(p)), [row.size for row in p]))
    settings = {**SPECS[loss_fn].config, **CONFIGS.get(loss_fn, {}), **config}
    loss = LOSS_FUNCTIONS[loss_fn](flat, inputs, sequence, settings)
    (gradient,) = torch.autograd.grad(loss, flat)
    cuts = np.cumsum([row.size for row in p])[:-1]
    parts = np.split(gradient.numpy(), cuts)
    return float(loss.detach()), [part.reshape(row.shape) for part, row in zip(parts, p, strict=True)]


def oracle(p: list[np.ndarray], data: list[Datum], loss_fn: str, config: Config) -> tuple[float, list[np.ndarray]]:
    request = Pass(model_id="m", data=tuple(data), loss_fn=loss_fn, loss_config={**CONFIGS.get(loss_fn, {}), **config})
    rows = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in p]
    loss = torch.stack([objective(row, datum, request) for row, datum in zip(rows, data, strict=True)]).sum()
    gradients = torch.autograd.grad(loss, rows, allow_unused=True)
    zeros = [np.zeros(row.shape) for row in p]
    filled = [zero if g is None else g.numpy() for g, zero in zip(gradients, zeros, strict=True)]
    return float(loss.detach()), filled


def assert_agree(p: list[np.ndarray], data: list[Datum], loss_fn: str, config: Config | None = None) -> None:
    loss, gradients = engine_loss(p, data, loss_fn, config or {})
    wanted, wanted_gradients = oracle(p, data, loss_fn, config or {})
    assert np.isfinite(loss)
    assert loss == pytest.approx(wanted, rel=1e-6)
    for gradient, target in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(gradient, target, rtol=1e-6, atol=1e-9)


def example(loss_fn: str, seed: int = 0) -> tuple[list[np.ndarray], list[Datum]]:
    draw = np.random.default_rng(seed)
    data = [datum_for(loss_fn, draw, length) for length in (40, 1, 25)]
    return [draw.normal(-6.0, 1.5, len(datum.tokens)) for datum in data], data


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_match_definition(loss_fn: str, seed: int) -> None:
    assert_agree(*example(loss_fn, seed), loss_fn)


@pytest.mark.parametrize("loss_fn", CLIPPED)
def test_clips_of_request_are_used(loss_fn: str) -> None:
    assert_agree(*example(loss_fn), loss_fn, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0})


def test_dual_clip_bounds_cost_of_bad_token() -> None:
    p, data = example("ppo")
    assert_agree(p, data, "ppo", {"dual_clip": 1.5})
    assert engine_loss(p, data, "ppo", {"dual_clip": 1.5})[0] < engine_loss(p, data, "ppo", {})[0]


@pytest.mark.parametrize("loss_fn", CLIPPED)
def test_clips_of_token_override_clips_of_request(loss_fn: str) -> None:
    p, data = example(loss_fn)
    draw = np.random.default_rng(7)
    data = [
        replace_inputs(
            datum,
            clip_low_threshold=draw.uniform(0, 1, len(datum.tokens)).astype(np.float32),
            clip_high_threshold=draw.uniform(1, 3, len(datum.tokens)).astype(np.float32),
        )
        for datum in data
    ]
    assert_agree(p, data, loss_fn, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})


def test_dro_uses_its_beta() -> None:
    assert_agree(*example("dro"), "dro", {"beta": 0.4})


def test_missing_weights_are_one() -> None:
    p, data = example("cross_entropy")
    bare = [Datum(tokens=datum.tokens, targets=datum.targets) for datum in data]
    assert_agree(p, bare, "cross_entropy")


def test_several_targets_per_position_have_own_weights() -> None:
    draw = np.random.default_rng(2)
    tokens = np.arange(6, dtype=np.int32)
    weights = draw.normal(size=(6, 3)).astype(np.float32)
    datum = Datum(tokens=tokens, targets=draw.integers(0, 512, (6, 3)), inputs={"weights": weights})
    p = draw.normal(-4, 1, (6, 3))
    assert_agree([p], [datum], "cross_entropy")
    loss, (gradient,) = engine_loss([p], [datum], "cross_entropy", {})
    assert loss == pytest.approx(-(weights * p).sum(), rel=1e-6)
    np.testing.assert_allclose(gradient, -weights, rtol=1e-6)


@pytest.mark.parametrize("loss_fn", [name for name in RL_LOSSES if name != "dro"])
@pytest.mark.parametrize("absurd", [-1e4, -300.0, 0.0, 1e4])
def test_position_without_advantage_has_no_effect(loss_fn: str, absurd: float) -> None:
    p, data = example(loss_fn)
    masked = [
        replace_inputs(
            datum,
            logprobs=np.where(datum.inputs["advantages"] == 0, np.float32(absurd), datum.inputs["logprobs"]),
        )
        for datum in data
    ]
    clean, clean_gradients = engine_loss(p, data, loss_fn, {})
    loss, gradients = engine_loss(p, masked, loss_fn, {})
    assert loss == clean
    for gradient, target in zip(gradients, clean_gradients, strict=True):
        np.testing.assert_array_equal(gradient, target)


def test_sequence_without_advantage_has_no_gradient() -> None:
    for loss_fn in ("importance_sampling", "ppo", "cispo", "gspo"):
        p, data = example(loss_fn)
        zeros = [replace_inputs(datum, advantages=np.zeros(len(datum.tokens), np.float32)) for datum in data]
        loss, gradients = engine_loss(p, zeros, loss_fn, {})
        assert loss == 0.0
        assert all((gradient == 0).all() for gradient in gradients)


def test_gspo_ratio_is_per_sequence() -> None:
    p, data = example("gspo")
    together, _ = engine_loss(p, data, "gspo", {})
    alone = [engine_loss([row], [datum], "gspo", {})[0] for row, datum in zip(p, data, strict=True)]
    assert together == pytest.approx(sum(alone), rel=1e-9)


def test_gspo_with_empty_mask_is_finite() -> None:
    p, data = example("gspo")
    blank = [replace_inputs(datum, sequence_ratio_mask=np.zeros(len(datum.tokens), np.float32)) for datum in data]
    assert_agree(p, blank, "gspo")


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_losses_are_sums_over_datums(loss_fn: str) -> None:
    p, data = example(loss_fn)
    once, _ = engine_loss(p, data, loss_fn, {})
    twice, _ = engine_loss(p + p, data + data, loss_fn, {})
    assert twice == pytest.approx(2 * once, rel=1e-12)
