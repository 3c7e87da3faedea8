"""The oracle itself, against finite differences and closed forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.data import LOSSES, RL_LOSSES, datum_for, pass_for
from tests.engine.reference import Reference, assert_same, objective, write_adapter
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass


def value_and_gradient(p: np.ndarray, datum: Datum, request: Pass) -> tuple[float, np.ndarray]:
    logprobs = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    loss = objective(logprobs, datum, request)
    (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    return float(loss.detach()), np.zeros_like(p) if gradient is None else gradient.numpy()


def example(loss_fn: str, length: int = 12, seed: int = 3) -> tuple[np.ndarray, Datum, Pass]:
    draw = np.random.default_rng(seed)
    datum = datum_for(loss_fn, draw, length)
    return draw.normal(-6.0, 1.5, length), datum, Pass(model_id="m", data=(datum,), loss_fn=loss_fn)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_gradient_matches_finite_differences(loss_fn: str) -> None:
    p, datum, request = example(loss_fn)
    _, gradient = value_and_gradient(p, datum, request)
    for t in range(len(p)):
        nudge = np.zeros_like(p)
        nudge[t] = 1e-6
        above, _ = value_and_gradient(p + nudge, datum, request)
        below, _ = value_and_gradient(p - nudge, datum, request)
        assert (above - below) / 2e-6 == pytest.approx(gradient[t], rel=1e-5, abs=1e-6)


def test_importance_sampling_gradient_is_minus_ratio_advantage() -> None:
    p, datum, request = example("importance_sampling")
    _, gradient = value_and_gradient(p, datum, request)
    ratio = np.exp(p - datum.inputs["logprobs"])
    np.testing.assert_allclose(gradient, np.where(datum.inputs["advantages"], -ratio * datum.inputs["advantages"], 0))


def test_ppo_gradient_is_zero_beyond_the_clip() -> None:
    q = np.array([-2.0, -2.0, -2.0, -2.0], dtype=np.float32)
    p = q + np.log([1.5, 0.5, 1.5, 0.5])
    advantages = np.array([1.0, 1.0, -1.0, -1.0], dtype=np.float32)
    datum = Datum(tokens=np.arange(4), targets=np.arange(4), inputs={"logprobs": q, "advantages": advantages})
    loss, gradient = value_and_gradient(p, datum, Pass(model_id="m", data=(datum,), loss_fn="ppo"))
    np.testing.assert_allclose(gradient, [0.0, -0.5, 1.5, 0.0], atol=1e-6)
    assert loss == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8), abs=1e-6)


def test_cispo_gradient_is_clipped_ratio_times_advantage() -> None:
    p, datum, request = example("cispo")
    _, gradient = value_and_gradient(p, datum, request)
    ratio = np.clip(np.exp(np.minimum(p - datum.inputs["logprobs"], 50)), 0.0, 4.0)
    np.testing.assert_allclose(gradient, -ratio * datum.inputs["advantages"])


def test_gspo_ratio_is_the_same_for_all_tokens_of_a_sequence() -> None:
    p, datum, request = example("gspo")
    wide = Pass(
        model_id="m",
        data=request.data,
        loss_fn="gspo",
        loss_config={"clip_low_threshold": 0.0, "clip_high_threshold": 1e9},
    )
    loss, gradient = value_and_gradient(p, datum, wide)
    mask = datum.inputs["sequence_ratio_mask"] != 0
    ratio = np.exp((p - datum.inputs["logprobs"])[mask].mean())
    assert loss == pytest.approx(-ratio * datum.inputs["advantages"].sum())
    np.testing.assert_allclose(gradient, -ratio * datum.inputs["advantages"])


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "gspo"])
def test_loss_is_minus_sum_of_advantages_on_policy(loss_fn: str) -> None:
    p, datum, request = example(loss_fn)
    datum = Datum(tokens=datum.tokens, targets=datum.targets, inputs={**datum.inputs, "logprobs": p})
    loss, gradient = value_and_gradient(p, datum, request)
    assert loss == pytest.approx(-datum.inputs["advantages"].sum())
    np.testing.assert_allclose(gradient, -datum.inputs["advantages"], atol=1e-12)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_padding_does_not_change_gradients(loss_fn: str, tiny_llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tiny_llama, tmp_path, LoraSpec(rank=4, seed=1))
    together, alone = Reference(tiny_llama, adapter), Reference(tiny_llama, adapter)
    request = pass_for(loss_fn)
    (loss,) = together.backward(request)
    parts = [replace(request, data=(datum,)) for datum in request.data]
    assert loss == pytest.approx(sum(alone.backward(*parts)), rel=1e-6)
    assert_same(together.gradients(), alone.gradients(), tolerance=1e-5)


def test_adam_matches_published_equations(tiny_llama: Path, tmp_path: Path) -> None:
    reference = Reference(tiny_llama, write_adapter(tiny_llama, tmp_path, LoraSpec(rank=2, seed=1)))
    adam = AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.5)
    moments: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for count in (1, 2, 3):
        reference.backward(pass_for("cross_entropy", seed=count))
        before, gradients = reference.weights(), reference.gradients()
        norm = float(np.sqrt(sum((g**2).sum() for g in gradients.values())))
        assert reference.step(adam) == pytest.approx(norm)
        assert norm > adam.grad_clip_norm
        for name, weight in reference.weights().items():
            g = gradients[name] * (adam.grad_clip_norm / (norm + 1e-6))
            m, v = moments.get(name, (np.zeros_like(g), np.zeros_like(g)))
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            moments[name] = m, v
            update = (m / (1 - 0.8**count)) / (np.sqrt(v / (1 - 0.9**count)) + adam.eps)
            np.testing.assert_allclose(weight, before[name] * (1 - 3e-3 * 0.1) - 3e-3 * update, rtol=1e-9, atol=1e-12)


def test_data_reach_both_sides_of_every_clip() -> None:
    """Otherwise the comparisons with the engine would say little about clipping."""
    for loss_fn in RL_LOSSES:
        datums = pass_for(loss_fn, lengths=(64,)).data
        q, advantages = datums[0].inputs["logprobs"], datums[0].inputs["advantages"]
        ratio = np.exp(np.full(64, -6.0) - q)[advantages != 0]
        signs = advantages[advantages != 0]
        for low, high in ((0.8, 1.2), (0.0, 4.0)):
            assert (ratio > high)[signs > 0].any()
            assert (ratio > high)[signs < 0].any()
            assert low == 0.0 or ((ratio < low)[signs > 0].any() and (ratio < low)[signs < 0].any())


def test_logprobs_of_several_targets_per_position(tiny_llama: Path, tmp_path: Path) -> None:
    reference = Reference(tiny_llama, write_adapter(tiny_llama, tmp_path, LoraSpec(rank=2, seed=1)))
    tokens = np.array([5, 6, 7], dtype=np.int32)
    targets = np.array([[6, 9], [7, 9], [2, 9]])
    (p,) = reference.logprobs([Datum(tokens=tokens, targets=targets)])
    whole: Tensor = torch.from_numpy(reference.logits(tokens.tolist())).log_softmax(-1)
    expected = [[float(whole[i, token]) for token in row] for i, row in enumerate(targets)]
    np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-6)
