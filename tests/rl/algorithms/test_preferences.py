"""Preference losses against the formulas of their papers, in float64, with gradients; and the rows that they read."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor, sigmoid
from torch.nn.functional import logsigmoid

from tests.rl.algorithms.test_losses import batch_of
from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.algorithms.loss_dispatch import tokens_of_rows
from tinsmith.rl.algorithms.losses.preference import (
    BradleyTerryLoss,
    IpoLoss,
    KtoLoss,
    OrpoLoss,
    PreferenceLoss,
    SimpoLoss,
    log_odds,
)
from tinsmith.rl.policy.training_rows import Kind, TrainingRow

LENGTHS = ((2, 1), (1, 2), (3, 4))
"""Tokens of the chosen and the rejected reply of each pair."""


def ipo(p: list[Tensor], ref: list[Tensor]) -> Tensor:
    """Equation 17 of arXiv 2310.12036 with tau 0.4."""
    h = [(p[at] - ref[at]).sum() - (p[at + 1] - ref[at + 1]).sum() for at in (0, 2, 4)]
    return torch.stack([(each - 1 / 0.8) ** 2 for each in h]).mean()


def simpo(p: list[Tensor], ref: list[Tensor]) -> Tensor:
    """Equation 6 of arXiv 2405.14734 with beta 1.5 and gamma 0.3."""
    pairs = [(p[at], p[at + 1]) for at in (0, 2, 4)]
    return -torch.stack([logsigmoid(1.5 * won.mean() - 1.5 * lost.mean() - 0.3) for won, lost in pairs]).mean()


def orpo(p: list[Tensor], ref: list[Tensor]) -> Tensor:
    """Equations 3 to 7 of arXiv 2403.07691 with lambda 0.2."""
    likelihoods = [each.mean().exp() for each in p]
    odds = [each / (1 - each) for each in likelihoods]
    return torch.stack(
        [-p[at].mean() - 0.2 * logsigmoid(torch.log(odds[at] / odds[at + 1])) for at in (0, 2, 4)]
    ).mean()


def kto(p: list[Tensor], ref: list[Tensor]) -> Tensor:
    """Equation 8 of arXiv 2402.01306 with beta 0.5, lambda 1.2 and 0.7; rows from 6 on are mismatched."""
    r = [(each - other).sum() for each, other in zip(p, ref, strict=True)]
    z = max(0.0, float(torch.stack(r[6:]).mean().detach()))
    desirable = [1.2 - 1.2 * sigmoid(0.5 * (r[at] - z)) for at in (0, 2, 4)]
    undesirable = [0.7 - 0.7 * sigmoid(0.5 * (z - r[at])) for at in (1, 3, 5)]
    return torch.stack(desirable + undesirable).mean()


def bradley_terry(p: list[Tensor], ref: list[Tensor]) -> Tensor:
    """Equation 1 of arXiv 2203.02155 for pairs, with the log-odds as the reward, and the centering of 2312.09244."""
    rewards = [torch.logit(each.sum().exp()) for each in p]
    pairs = [(rewards[at], rewards[at + 1]) for at in (0, 2, 4)]
    return torch.stack([0.05 * (won + lost) ** 2 - logsigmoid(won - lost) for won, lost in pairs]).mean()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        (IpoLoss(tau=0.4), ipo),
        (SimpoLoss(beta=1.5, gamma=0.3), simpo),
        (OrpoLoss(weight=0.2), orpo),
        (KtoLoss(beta=0.5, desirable_weight=1.2, undesirable_weight=0.7), kto),
        (BradleyTerryLoss(center=0.05), bradley_terry),
    ],
    ids=lambda value: getattr(value, "type", ""),
)
def test_loss_and_gradient_equal_those_of_the_paper(loss: PreferenceLoss, formula, seed):
    random = np.random.default_rng(seed)
    lengths = [length for pair in LENGTHS for length in pair] + ([3, 2] if loss.reads_mismatched else [])
    # with an even seed the divergence of kto is positive, else it is clipped to 0
    shift = -0.4 if seed % 2 else 0.4
    p = [-random.uniform(0.1, 3.0, length) for length in lengths]
    ref = torch.from_numpy(np.concatenate([each - shift - random.uniform(-0.1, 0.1, len(each)) for each in p]))
    rows = [[(float(value), 0, 0) for value in each] for each in p]
    pairs = torch.tensor([[0, 1], [2, 3], [4, 5]])
    mismatched = torch.tensor([6, 7]) if loss.reads_mismatched else None
    logprobs, batch = batch_of(rows, reference=ref, pairs=pairs, mismatched=mismatched)
    value, metrics = loss.total(logprobs, batch)
    (grad,) = torch.autograd.grad(value, logprobs)
    leaf = logprobs.detach().clone().requires_grad_()
    expected = formula(list(leaf.split(lengths)), list(ref.split(lengths)))
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, leaf)[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(metrics["pairs/margin"], metrics["pairs/chosen"] - metrics["pairs/rejected"])
    if mismatched is not None:
        assert not grad[-5:].any()
        assert bool(metrics["pairs/divergence"] > 0) == (seed % 2 == 0)
    arrays = loss.total(logprobs.detach().numpy(), _arrays(batch))[0]
    assert float(arrays) == pytest.approx(float(value.detach()))
    with pytest.raises(ConfigError, match="pairs"):
        loss.total(*batch_of(rows, reference=ref))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("labels", ["+--", "+++", "--", "+-+-"])
def test_kto_of_labels_equals_the_paper(labels, seed):
    """Equation 8 of arXiv 2402.01306, written out; each reply has a row after another prompt."""
    random = np.random.default_rng(seed)
    p = [-random.uniform(0.1, 3.0, length) for length in random.integers(1, 5, 2 * len(labels))]
    ref = [each - (0.3 if seed else -0.3) - random.uniform(-0.1, 0.1, len(each)) for each in p]
    kinds: list[Kind] = []
    for label in labels:
        kinds.extend(("desirable" if label == "+" else "undesirable", "mismatched"))
    rows = [_row(kind, *columns) for kind, *columns in zip(kinds, p, ref, strict=True)]
    config = AlgorithmConfig.model_validate(
        {"type": "kto", "loss": {"beta": 0.5, "desirable_weight": 1.2, "undesirable_weight": 0.7}}
    )
    batch = tokens_of_rows(rows, config, 1).as_tensors()
    leaf = torch.from_numpy(np.concatenate(p)).requires_grad_()
    value, metrics = config.loss.total(leaf, batch)
    ratios = [each.sum() for each in (leaf - torch.from_numpy(np.concatenate(ref))).split(list(map(len, p)))]
    z = max(0.0, float(torch.stack(ratios[1::2]).detach().mean()))
    terms = [
        1.2 * (1 - sigmoid(0.5 * (ratio - z))) if label == "+" else 0.7 * (1 - sigmoid(0.5 * (z - ratio)))
        for label, ratio in zip(labels, ratios[::2], strict=True)
    ]
    expected = torch.stack(terms).mean()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(each, leaf, retain_graph=True)[0] for each in (value, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)
    assert float(metrics["labels/divergence"]) == pytest.approx(0.5 * z, rel=1e-6)
    right = [(ratio > z) == (label == "+") for label, ratio in zip(labels, ratios[::2], strict=True)]
    assert float(metrics["labels/accuracy"]) == pytest.approx(np.mean([bool(each) for each in right]))
    assert ("labels/desirable" in metrics, "labels/undesirable" in metrics) == ("+" in labels, "-" in labels)


def _row(kind: Kind, p: np.ndarray, ref: np.ndarray) -> TrainingRow:
    """A row of a reply without a prompt."""
    zeros, ids = np.zeros(len(p), np.float32), np.arange(len(p))
    reference = {"reference": ref}
    return TrainingRow(
        tokens=ids, targets=ids, logprobs=zeros, advantages=zeros, mask=zeros == 0, kind=kind, columns=reference
    )


def test_kto_needs_labels_or_pairs():
    config = AlgorithmConfig.model_validate({"type": "kto"})
    batch = tokens_of_rows([_row("mismatched", -np.ones(2), -np.ones(2))], config, 1)
    with pytest.raises(ConfigError, match="replies with labels, or on pairs"):
        config.loss.total(-np.ones(2), batch)


def _arrays(batch):
    named = {each.name: getattr(batch, each.name) for each in fields(batch)}
    return replace(batch, **{name: v.numpy() for name, v in named.items() if isinstance(v, Tensor)})


def test_odds_of_a_certain_reply_are_finite():
    leaf = torch.tensor([0.0, -1e-12, -700.0], dtype=torch.float64, requires_grad=True)
    odds = log_odds(leaf)
    odds.sum().backward()
    assert torch.isfinite(odds).all()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
