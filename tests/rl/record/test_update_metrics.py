"""Metrics of optimizer steps equal values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tinsmith.rl.policy.trainer import Update, UpdateResult
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.record.update_metrics import update_metrics


def row(logprobs: list[float], count: int = 1, reference: list[float] | None = None) -> TrainingRow:
    """A row of a prompt of two tokens and a reply with these logprobs of the sampler."""
    values = np.array([0.0, *logprobs], np.float32)
    return TrainingRow(
        tokens=np.arange(len(values)),
        targets=np.arange(len(values)) + 1,
        logprobs=values,
        advantages=values,
        mask=np.arange(len(values)) > 0,
        count=count,
        columns={} if reference is None else {"reference": np.array([0.0, *reference], np.float32)},
    )


def result(*logprobs: list[float], **metrics: float) -> UpdateResult:
    """Logprobs of the trainer for each row, and metrics of the server."""
    return UpdateResult(logprobs=tuple(np.array([-9.0, *each], np.float32) for each in logprobs), metrics=metrics)


def test_ratio_kl_and_entropy_weigh_merged_rows_by_count():
    update = Update(rows=(row([-1.0], 3), row([-2.0], 1)), measure=lambda _: {"clip_fraction": 0.25})
    updated = result([-1.5], [-2.0], **{"loss:sum": -3.0, "grad_norm": 2.0})
    numbers = update_metrics([(update, updated)])
    assert numbers["optim/ratio_mean"] == pytest.approx((3 * np.exp(-0.5) + 1) / 4)
    assert numbers["optim/ratio_min"] == pytest.approx(np.exp(-0.5))
    assert (numbers["optim/ratio_max"], numbers["optim/clip_fraction"]) == (1.0, 0.25)
    assert numbers["optim/kl_sample_train_v1"] == pytest.approx(3 * 0.5 / 4)
    assert numbers["optim/kl_sample_train_v2"] == pytest.approx(3 * 0.25 / 4 / 2)
    assert numbers["optim/kl_sample_train_k3"] == pytest.approx(3 * (math.exp(-0.5) - 1 + 0.5) / 4)
    assert numbers["optim/entropy"] == pytest.approx((3 * 1 + 2) / 4)
    assert (numbers["optim/loss"], numbers["optim/grad_norm"]) == (-3.0, 2.0)
    assert "optim/kl_reference_k1" not in numbers


def test_effective_sample_sizes_of_tokens_and_rows():
    update = Update(rows=(row([-1.0, -2.0], 2), row([-1.0])))
    numbers = update_metrics([(update, result([-0.5, -2.3], [-1.4]))])
    tokens = [math.exp(0.5), math.exp(-0.3)] * 2 + [math.exp(-0.4)]
    rows = [math.exp(0.2)] * 2 + [math.exp(-0.4)]
    for name, weights in (("tokens", tokens), ("sequences", rows)):
        expected = sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
        assert numbers[f"optim/ess_{name}"] == pytest.approx(expected, rel=1e-6)
    equal = update_metrics([(update, result([-1.0, -2.0], [-1.0]))])
    assert (equal["optim/ess_tokens"], equal["optim/ess_sequences"]) == (1.0, 1.0)


def test_divergence_from_the_reference_by_hand():
    update = Update(rows=(row([-1.0, -2.0], reference=[-1.2, -1.5]),))
    numbers = update_metrics([(update, result([-0.9, -2.1]))])
    differences = [0.3, -0.6]
    assert numbers["optim/kl_reference_k1"] == pytest.approx(sum(differences) / 2, rel=1e-5)
    k3 = sum(math.exp(-d) - 1 + d for d in differences) / 2
    assert numbers["optim/kl_reference_k3"] == pytest.approx(k3, rel=1e-5)


def test_several_updates_are_averaged():
    update = Update(rows=(row([-1.0]),))
    updates = [(update, result([-1.0], **{"loss:sum": 1.0})), (update, result([-0.5], **{"loss:sum": 3.0}))]
    numbers = update_metrics(updates)
    assert numbers["optim/kl_sample_train_v2"] == 0.0
    assert numbers["optim/ratio_mean"] == pytest.approx((1 + math.exp(0.5)) / 2)
    assert (numbers["optim/steps"], numbers["optim/rows"], numbers["optim/loss"]) == (2, 1, 2.0)
    assert numbers["tokens/trained"] == 4
    parts = update_metrics(updates, streamed=True)
    assert (parts["optim/steps"], parts["optim/loss"]) == (1, 4.0)
    assert parts["optim/kl_sample_train_v2"] == pytest.approx(0.25 / 4)
