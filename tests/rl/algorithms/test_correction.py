"""Corrected losses have the gradient of their definition, token by token, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.rl.algorithms.helpers import columns, run
from tests.rl.algorithms.test_loss_dispatch import OURS, config, grads, groups, logprobs_near
from tinsmith.rl.algorithms import loss_dispatch
from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.policy.trainer import Update
from tinsmith.rl.policy.training_rows import TrainingRow

BOUNDING = ["importance_sampling", "ppo", "cispo", "gspo"]


def weight(correction: dict, differences: list[float]) -> list[float]:
    """Weights of the tokens of a row with these differences p - q."""
    if correction.get("level") == "sequence":
        differences = [math.fsum(differences)] * len(differences)
    ratios = [math.exp(difference) for difference in differences]
    cap, floor = correction.get("cap", 2.0), correction.get("floor", 0.0)
    if correction["type"] == "tis":
        return [min(ratio, cap) for ratio in ratios]
    return [ratio if floor <= ratio <= cap else 0.0 for ratio in ratios]


def by_hand(row: TrainingRow, logprobs: torch.Tensor, correction: dict, tokens: int) -> list[float]:
    """d loss / d logprob at the policy's tokens: -weight A / number of tokens."""
    differences = [float(p) - float(q) for p, q in zip(logprobs[row.mask], row.logprobs[row.mask], strict=True)]
    return [
        -float(a) * w / tokens for a, w in zip(row.advantages[row.mask], weight(correction, differences), strict=True)
    ]


def update_for(correction: dict, loss: str, extensions: frozenset[str] = OURS) -> tuple[Update, Update]:
    """The update, and the same computed by the client."""
    algorithm = config("grpo", correction=correction, loss={"type": loss}, aggregate="token_mean", merge_replies=False)
    update = run(Algorithm(algorithm, extensions, columns(), 0).score_part(1, groups()))
    batch = loss_dispatch.tokens_of_rows(update.rows, algorithm, 1)
    context = loss_dispatch.LossContext(step=1, kl_coef=0.0)
    return update, loss_dispatch.update_by_client(update.rows, batch, algorithm, context)


@pytest.mark.parametrize("loss", BOUNDING)
@pytest.mark.parametrize(
    "correction",
    [
        {"type": "tis"},
        {"type": "tis", "cap": 1.2},
        {"type": "tis", "level": "sequence", "cap": 1.5},
        {"type": "mis", "cap": 1.5, "floor": 0.5},
        {"type": "mis", "level": "sequence", "cap": 2.0, "floor": 0.7},
    ],
    ids=str,
)
def test_corrected_gradient_is_the_weighted_policy_gradient(correction, loss):
    update, by_client = update_for(correction, loss)
    assert (update.loss == "cispo") == (correction["type"] == "tis" and "level" not in correction)
    logprobs = logprobs_near(update.rows)
    tokens = sum(int(row.mask.sum()) for row in update.rows)
    for way in (update, by_client):
        for row, values, grad in zip(update.rows, logprobs, grads(way, logprobs), strict=True):
            expected = by_hand(row, values.detach(), correction, tokens)
            np.testing.assert_allclose(grad[torch.from_numpy(row.mask)], expected, rtol=1e-5, atol=1e-8)
            assert not grad[~torch.from_numpy(row.mask)].any()


def masked(correction: dict, differences: list[float], advantage: float) -> list[bool]:
    """Which tokens of a row with these differences p - q the mask ignores."""
    low, high = correction["mask_low"], correction["mask_high"]
    total = math.fsum(differences)
    match correction["mask"]:
        case "token":
            ratios = [math.exp(difference) for difference in differences]
            return [(advantage > 0 and ratio > high) or (advantage < 0 and ratio < low) for ratio in ratios]
        case "sequence":
            return [not low <= math.exp(total) <= high] * len(differences)
        case _:
            return [not low <= math.exp(total / len(differences)) <= high] * len(differences)


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo"])
@pytest.mark.parametrize("mask", ["token", "sequence", "geometric"])
def test_masked_gradient_is_zero_exactly_where_the_mask_holds(mask, loss):
    correction = {"mask": mask, "mask_low": 0.7, "mask_high": 1.3}
    update, by_client = update_for(correction, loss)
    assert (update.loss == "ppo") == (mask == "token" and loss == "importance_sampling")
    logprobs = logprobs_near(update.rows)
    tokens = sum(int(row.mask.sum()) for row in update.rows)
    seen = set()
    for way in (update, by_client):
        for row, values, grad in zip(update.rows, logprobs, grads(way, logprobs), strict=True):
            q, p = row.logprobs[row.mask].astype(float), values.detach()[row.mask].numpy()
            advantage = float(row.advantages[row.mask][0])
            ignored = masked(correction, list(p - q), advantage)
            seen |= set(ignored)
            ratios = np.exp(p - q) if loss == "importance_sampling" else np.minimum(np.exp(p - q), 1.28)
            expected = [0.0 if out else -advantage * r / tokens for out, r in zip(ignored, ratios, strict=True)]
            np.testing.assert_allclose(grad[torch.from_numpy(row.mask)], expected, rtol=1e-5, atol=1e-8)
    assert seen == {True, False}


def test_share_of_masked_tokens_is_reported_on_both_paths():
    update, by_client = update_for({"mask": "token", "mask_low": 0.7, "mask_high": 1.3}, "importance_sampling")
    logprobs = logprobs_near(update.rows)
    flags = [
        flag
        for row, values in zip(update.rows, logprobs, strict=True)
        for flag in masked(
            {"mask": "token", "mask_low": 0.7, "mask_high": 1.3},
            list(values.detach()[row.mask].numpy() - row.logprobs[row.mask].astype(float)),
            float(row.advantages[row.mask][0]),
        )
    ]
    assert update.measure is not None
    assert by_client.client is not None
    measured = update.measure([values.detach().numpy() for values in logprobs])
    for numbers in (measured, by_client.client(logprobs)[1]):
        assert numbers["correction/masked"] == pytest.approx(sum(flags) / len(flags))


def test_masks_by_sign_keep_replies_of_different_signs_apart():
    assert config("grpo").advantage_kink is None
    assert config("grpo", correction={"mask": "token"}).advantage_kink == 0.0
    assert config("grpo", correction={"mask": "geometric"}).merges_rows
    threshold = {"type": "topr", "threshold": 0.5}
    assert not config("grpo", loss=threshold, correction={"mask": "token"}).merges_rows


def test_ratios_to_the_trainer_itself_are_the_policy_gradient():
    update, by_client = update_for({"type": "proximal"}, "ppo")
    assert update.loss == "cispo"
    logprobs = logprobs_near(update.rows)
    tokens = sum(int(row.mask.sum()) for row in update.rows)
    for way in (update, by_client):
        for row, grad in zip(update.rows, grads(way, logprobs), strict=True):
            expected = -row.advantages[row.mask].astype(float) / tokens
            np.testing.assert_allclose(grad[torch.from_numpy(row.mask)], expected, rtol=1e-5, atol=1e-8)


def test_weights_are_reported_with_the_share_that_was_bounded():
    _, by_client = update_for({"type": "tis", "cap": 1.2}, "importance_sampling")
    logprobs = logprobs_near(by_client.rows)
    assert by_client.client is not None
    _, numbers = by_client.client(logprobs)
    ratios = [
        math.exp(float(p) - float(q))
        for row, values in zip(by_client.rows, logprobs, strict=True)
        for p, q in zip(values.detach()[row.mask], row.logprobs[row.mask], strict=True)
    ]
    assert numbers["correction/weight"] == pytest.approx(sum(min(ratio, 1.2) for ratio in ratios) / len(ratios))
    assert numbers["correction/bounded"] == pytest.approx(sum(ratio > 1.2 for ratio in ratios) / len(ratios))


def test_without_mismatch_the_correction_changes_nothing():
    plain, _ = update_for({}, "importance_sampling")
    corrected, by_client = update_for({"type": "tis"}, "importance_sampling")
    logprobs = [torch.tensor(row.logprobs, dtype=torch.float64, requires_grad=True) for row in plain.rows]
    for expected, server, client in zip(
        grads(plain, logprobs), grads(corrected, logprobs), grads(by_client, logprobs), strict=True
    ):
        torch.testing.assert_close(server, expected)
        torch.testing.assert_close(client, expected)


def test_demonstrations_are_not_weighted():
    algorithm = config("mix", correction={"type": "tis", "cap": 1.0}, kl={"type": "none", "coef": 0})
    update = run(Algorithm(algorithm, OURS, columns(), 0).score_part(1, groups()))
    batch = loss_dispatch.tokens_of_rows(update.rows, algorithm, 1)
    expert = batch.sequence == 0
    corrected, _ = algorithm.correction.corrected(batch.old + 1.0, replace(batch, expert=expert))
    assert corrected.expert_weights.tolist() == batch.expert_weights.tolist()
    assert corrected.weights[expert].tolist() == batch.weights[expert].tolist()


@pytest.mark.parametrize(
    ("name", "more", "sentence"),
    [
        ("grpo", {"correction": {"cap": 3.0}}, "cap is not used with type: none"),
        ("grpo", {"correction": {"type": "tis", "floor": 0.1}}, "floor is not used with type: tis"),
        ("grpo", {"correction": {"type": "mis", "floor": 3.0}}, "floor 3 is above cap 2"),
        ("sft", {"correction": {"type": "tis"}}, "samples no rollouts"),
        ("rloo", {"correction": {"type": "tis"}, "loss": {"mask_drift": 0.1}}, "after which no reply drifts"),
    ],
)
def test_corrections_without_effect_are_refused(name, more, sentence):
    with pytest.raises(ValueError, match=sentence):
        config(name, **more)
