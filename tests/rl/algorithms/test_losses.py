"""Each loss equals the formula of its paper, token by token, in value and gradient (float64)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms.losses import policy_gradient, supervised
from tinsmith.rl.algorithms.losses.base import Tokens, aggregate_weights
from tinsmith.rl.algorithms.losses.preference import DpoLoss
from tinsmith.rl.algorithms.regularizers import EntropyConfig, KlConfig, divergence, sampled_entropy

TOKEN = st.tuples(st.floats(-4, -0.05), st.floats(-1, 1), st.floats(-2, 2))
"""(p, p - q, A): logprob, its difference from the sampler's logprob, advantage."""
ROWS = st.lists(st.lists(TOKEN, min_size=1, max_size=4), min_size=1, max_size=4)


def batch_of(rows, aggregate="token_mean", counts=None, expert=None, **more) -> tuple[Tensor, Tokens]:
    """Leaf logprobs [T] and the tokens of rows of (p, p - q, A)."""
    tokens = [token for row in rows for token in row]
    sequence = torch.tensor([at for at, row in enumerate(rows) for _ in row])
    of = torch.tensor(counts or [1.0] * len(rows), dtype=torch.float64)[sequence]
    is_expert = torch.tensor(expert or [False] * len(rows))[sequence]
    logprobs = torch.tensor([p for p, _, _ in tokens], dtype=torch.float64, requires_grad=True)
    return logprobs, Tokens(
        old=torch.tensor([p - gap for p, gap, _ in tokens], dtype=torch.float64),
        advantages=torch.tensor([a for _, _, a in tokens], dtype=torch.float64),
        sequence=sequence,
        counts=of,
        expert=is_expert,
        weights=aggregate_weights(aggregate, sequence, of, torch.ones_like(is_expert)),
        policy_weights=aggregate_weights(aggregate, sequence, of, ~is_expert),
        expert_weights=aggregate_weights(aggregate, sequence, of, is_expert),
        **more,
    )


def assert_loss_equals(
    loss: policy_gradient.PolicyLoss, rows, by_hand: Callable[[Tensor, float, float, list], Tensor]
) -> None:
    """Assert that a loss is the mean over all tokens of `by_hand(p, q, A, row)`, in value and gradient."""
    logprobs, batch = batch_of(rows)
    value, metrics = loss.total(logprobs, batch)
    (grad,) = torch.autograd.grad(value, logprobs)
    leaves = [[torch.tensor(p, dtype=torch.float64, requires_grad=True) for p, _, _ in row] for row in rows]
    count = sum(len(row) for row in rows)
    expected = sum(
        by_hand(leaf, p - gap, a, row) / count
        for row, leaf_row in zip(rows, leaves, strict=True)
        for (p, gap, a), leaf in zip(row, leaf_row, strict=True)
    )
    assert isinstance(expected, Tensor)
    flat = [leaf for row in leaves for leaf in row]
    grads = torch.autograd.grad(expected, flat, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grad, torch.stack(grads), rtol=1e-9, atol=1e-9)
    assert all(math.isfinite(sg(metric)) for metric in metrics.values())


def sg(value: Tensor) -> float:
    """Value of a tensor without its gradient."""
    return float(value.detach())


@settings(deadline=None)
@given(ROWS)
def test_ppo_equals_its_formula_with_and_without_dual_clip(rows):
    def by_hand(p, q, a, _row, low=0.2, high=0.3, c=None):
        r = torch.exp(p - q)
        clip = r if 1 - low <= sg(r) <= 1 + high else p * 0 + min(max(sg(r), 1 - low), 1 + high)
        value = -a * r if sg(-a * r) >= sg(-a * clip) else -a * clip
        if c is not None and a < 0 and sg(value) > -a * c:
            return value * 0 - a * c
        return value

    rows = [[token for token in row if abs(token[2]) > 1e-6 and abs(token[1]) > 1e-6] for row in rows]
    rows = [row for row in rows if row]
    if rows:
        assert_loss_equals(policy_gradient.PpoLoss(clip_low=0.2, clip_high=0.3, dual_clip=None), rows, by_hand)
        assert_loss_equals(
            policy_gradient.PpoLoss(clip_low=0.2, clip_high=0.3, dual_clip=1.5),
            rows,
            lambda p, q, a, row: by_hand(p, q, a, row, c=1.5),
        )


def test_ppo_supports_on_policy_and_mask_drift():
    rows = [[(-1.0, -2.0, -1.0), (-1.0, -2.0, 0.5)], [(-1.0, 0.0, -1.0)]]
    assert_loss_equals(policy_gradient.PpoLoss(on_policy=True), rows, lambda p, q, a, _: -a * torch.exp(p - sg(p)))
    logprobs, batch = batch_of(rows, "token_sum")
    value, _ = policy_gradient.PpoLoss(mask_drift=0.1, dual_clip=None).total(logprobs, batch)
    (grad,) = torch.autograd.grad(value, logprobs)
    assert grad[0] == 0.0  # A < 0 in a reply that drifted
    assert grad[1] != 0.0
    assert grad[2] == 1.0


@settings(deadline=None)
@given(ROWS)
def test_ratio_losses_equal_their_formulas(rows):
    assert_loss_equals(policy_gradient.ImportanceSamplingLoss(), rows, lambda p, q, a, _: -a * torch.exp(p - q))
    assert_loss_equals(
        policy_gradient.CispoLoss(clip_low=0.4),
        rows,
        lambda p, q, a, _: -a * min(max(math.exp(sg(p) - q), 0.6), 1.28) * p,
    )
    assert_loss_equals(
        policy_gradient.ToprLoss(), rows, lambda p, q, a, _: -a * (1.0 if a > 0 else min(1.0, math.exp(sg(p) - q))) * p
    )

    def sapo(p, q, a, _):
        tau = 1.0 if a > 0 else 1.05
        return -a * 4 / tau * torch.sigmoid(tau * (torch.exp(p - q) - 1))

    assert_loss_equals(policy_gradient.SapoLoss(), rows, sapo)
    assert_loss_equals(
        policy_gradient.SapoLoss(score_function=True), rows, lambda p, q, a, _: sapo(p.detach(), q, a, _) * p
    )

    def sppo(p, q, a, _):
        return -a * (p - q) if 1 / 1.3 <= math.exp(sg(p) - q) <= 1.3 else p * 0

    assert_loss_equals(policy_gradient.SppoLoss(), rows, sppo)
    assert_loss_equals(policy_gradient.DroLoss(beta=0.3), rows, lambda p, q, a, _: -(p * a - 0.15 * (p - q) ** 2))


@settings(deadline=None)
@given(ROWS)
def test_cispo_mask_may_have_bounds_of_its_own(rows):
    def by_hand(p, q, a, _, low=0.5, high=0.1):
        r = math.exp(sg(p) - q)
        inside = not ((a > 0 and r > 1 + high) or (a < 0 and r < 1 - low))
        return -a * inside * min(max(r, 0.6), 1.28) * p

    own = policy_gradient.CispoLoss(clip_low=0.4, mask=True, mask_low=0.5, mask_high=0.1)
    assert_loss_equals(own, rows, by_hand)
    clips = policy_gradient.CispoLoss(clip_low=0.4, mask=True)
    assert_loss_equals(clips, rows, lambda p, q, a, row: by_hand(p, q, a, row, low=0.4, high=0.28))
    with pytest.raises(ValueError, match="mask_low is not used with mask: false"):
        policy_gradient.CispoLoss(mask_low=0.1)


@settings(deadline=None)
@given(ROWS)
def test_gspo_uses_one_ratio_per_reply(rows):
    def by_hand(p, _q, a, row):
        s = math.exp(sum(gap for _, gap, _ in row) / len(row))
        r = s * torch.exp(p - sg(p))
        clip = min(max(s, 1 - 0.1), 1 + 0.2)
        return -a * r if -a * s >= -a * clip else p * 0 - a * clip

    rows = [[(p, gap, a if abs(a) > 1e-6 else 0.5) for p, gap, a in row] for row in rows]
    assert_loss_equals(policy_gradient.GspoLoss(clip_low=0.1, clip_high=0.2), rows, by_hand)


@pytest.mark.parametrize("clip", ["none", "one_side", "two_side", "ring", "gspo_one_side"])
@pytest.mark.parametrize("weight", ["none", "importance_sampling", "gspo_importance_sampling", "advantage"])
@pytest.mark.parametrize("regularizer", ["none", "k2", "forward_kl"])
def test_rec_equals_its_formula(clip, weight, regularizer):
    def by_hand(p, q, a, row):
        r, reply = math.exp(sg(p) - q), math.exp(sum(gap for _, gap, _ in row) / len(row))
        inside = {
            "none": True,
            "one_side": r <= 1.2 if a >= 0 else r >= 0.8,
            "gspo_one_side": reply <= 1.2 if a >= 0 else reply >= 0.8,
            "two_side": 0.8 <= r <= 1.2,
            "ring": 0.8 <= r <= 1.2 or (a > 0 and r <= 0.4) or (a < 0 and r >= 3.0),
        }[clip]
        w = {"none": 1.0, "importance_sampling": r, "gspo_importance_sampling": reply, "advantage": math.exp(a / 2)}
        extra = {"none": p * 0, "k2": 0.5 * (p - q) ** 2, "forward_kl": q - p}[regularizer]
        return -a * w[weight] * inside * p + 0.3 * extra

    rows = [[(-1.0, gap, a)] for gap in (-1.5, -0.5, 0.1, 0.5, 1.5) for a in (-1.0, 0.7)]
    temperature = {"temperature": 2.0} if weight == "advantage" else {}
    coefficient = {"regularizer_coef": 0.3} if regularizer != "none" else {}
    loss = policy_gradient.RecLoss(clip=clip, weight=weight, regularizer=regularizer, **temperature, **coefficient)
    assert_loss_equals(loss, [*rows, [(-1.0, 0.3, 1.0), (-2.0, -0.2, 1.0)]], by_hand)


@settings(deadline=None)
@given(ROWS)
def test_likelihood_losses_equal_their_formulas(rows):
    assert_loss_equals(supervised.OpmdLoss(tau=0.5), rows, lambda p, q, a, _: -a * p / 1.5)
    assert_loss_equals(supervised.SftLoss(), rows, lambda p, q, a, _: -p)
    assert_loss_equals(supervised.SftIsLoss(), rows, lambda p, q, a, _: -math.exp(sg(p)) * p)
    assert_loss_equals(supervised.SftPhiLoss(), rows, lambda p, q, a, _: -math.exp(sg(p)) * (1 - math.exp(sg(p))) * p)


def test_dpo_equals_the_formula_of_its_paper():
    rows = [[(-1.0, 0, 0), (-0.5, 0, 0)], [(-2.0, 0, 0)], [(-0.3, 0, 0)], [(-0.4, 0, 0), (-3.0, 0, 0)]]
    reference = torch.tensor([-1.2, -0.4, -1.5, -0.3, -0.6, -2.0], dtype=torch.float64)
    logprobs, batch = batch_of(rows, reference=reference, pairs=torch.tensor([[0, 1], [2, 3]]))
    value, metrics = DpoLoss(beta=0.5, label_smoothing=0.1).total(logprobs, batch)
    (grad,) = torch.autograd.grad(value, logprobs)
    leaf = logprobs.detach().clone().requires_grad_()
    log_ratios = leaf - reference
    margins = [
        0.5 * (log_ratios[0] + log_ratios[1] - log_ratios[2]),
        0.5 * (log_ratios[3] - log_ratios[4] - log_ratios[5]),
    ]
    sigmoid = [1 / (1 + torch.exp(-margin)) for margin in margins]
    expected = sum(-0.9 * torch.log(s) - 0.1 * torch.log(1 - s) for s in sigmoid) / 2
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, leaf)[0])
    assert float(metrics["pairs/accuracy"]) in (0.0, 0.5, 1.0)
    with pytest.raises(ConfigError, match="pairs"):
        DpoLoss().total(*batch_of(rows))


def test_mix_weighs_demonstrations_separately():
    rows = [[(-1.0, 0.1, 0.5), (-1.0, 0.1, 0.5)], [(-2.0, -2.0, 0.0)]]
    logprobs, batch = batch_of(rows, expert=[False, True])
    value, numbers = supervised.MixLoss(mu=0.25).total(logprobs, batch)
    own = -0.5 * math.exp(0.1)
    assert sg(value) == pytest.approx(0.75 * own + 0.25 * 2.0)
    assert sg(numbers["mix/expert"]) == pytest.approx(2.0)
    chord = supervised.MixChordLoss(warmup_steps=10, decay_steps=10, peak=0.4, valley=0.2)
    assert [chord.share_at(step) for step in (5, 10, 15, 20, 99)] == pytest.approx([0.2, 0.4, 0.3, 0.2, 0.2])
    value, _ = supervised.MixChordLoss(warmup_steps=0, decay_steps=0, valley=0.5).total(logprobs, batch)
    chance = math.exp(-2.0)
    assert sg(value) == pytest.approx(0.5 * own + 0.5 * chance * (1 - chance) * 2.0)


@pytest.mark.parametrize(
    ("aggregate", "weights"),
    [
        ("token_sum", [1, 1, 1]),
        ("token_mean", [1 / 4, 1 / 4, 1 / 4]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq_mean_token_mean", [1 / 6, 1 / 6, 1 / 3]),
        ("seq_mean_token_sum_norm", [1 / 6, 1 / 6, 1 / 6]),
    ],
)
def test_aggregates_count_a_merged_row_once_per_reply(aggregate, weights):
    _, batch = batch_of([[(-1, 0, 1), (-1, 0, 1)], [(-1, 0, 1)]], aggregate, counts=[1.0, 2.0])
    assert batch.weights.tolist() == pytest.approx(weights)
    alone = batch.select_rows(torch.tensor([False, True]))
    assert alone.weights.tolist() == pytest.approx(weights[2:])
    assert alone.sequence.tolist() == [0]


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("k1", lambda d, r: d),
        ("k2", lambda d, r: 0.5 * d * d),
        ("k3", lambda d, r: math.exp(-d) - 1 + d),
        ("low_var_kl", lambda d, r: min(math.exp(-max(min(d, 20), -20)) - 1 + max(min(d, 20), -20), 10)),
        ("abs", lambda d, r: abs(d)),
        ("corrected_k3", lambda d, r: min(r, 2.0) * (math.exp(-d) - 1 + d)),
        ("none", lambda d, r: 0.0),
    ],
)
def test_divergences_equal_their_formulas(kind, formula):
    p, q, reference = (torch.tensor(v, dtype=torch.float64) for v in ([-1.0, -30.0], [-1.5, -32.0], [-1.3, -2.0]))
    values = divergence(kind, p, q, reference)
    expected = [
        formula(a - c, math.exp(a - b)) for a, b, c in zip(p.tolist(), q.tolist(), reference.tolist(), strict=True)
    ]
    assert values.tolist() == pytest.approx(expected)


def test_kl_coefficient_adapts_towards_its_target():
    kl = KlConfig(coef=0.1, target=0.05, horizon=100)
    assert kl.adapted_coef(0.1, 0.055, 50) == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    assert kl.adapted_coef(0.1, 9.0, 50) == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    assert kl.adapted_coef(0.1, 0.0, 50) == pytest.approx(0.1 * (1 - 0.2 * 0.5))
    assert KlConfig(coef=0.1).adapted_coef(0.1, 9.0, 50) == 0.1
    for wrong in ({"type": "none", "coef": 0.1}, {"target": 0.1}):
        with pytest.raises(ValueError, match=r"type: none|set coef above 0"):
            KlConfig.model_validate(wrong)


def test_sampled_entropy_is_unbiased_in_value_and_gradient():
    """The mean over the vocabulary, weighted by probability, is the entropy; likewise for the gradient."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, 0)
    entropy = -(logprobs.exp() * logprobs).sum()
    (exact,) = torch.autograd.grad(entropy, logits, retain_graph=True)
    behaviour = torch.log_softmax(torch.tensor([1.0, 0.5, 0.0, -0.5], dtype=torch.float64), 0)
    for old in (logprobs.detach(), behaviour):
        rows = [[(float(p), float(p - q), 0.0)] for p, q in zip(logprobs.detach(), old, strict=True)]
        _, batch = batch_of(rows)
        values, grads = sampled_entropy(logprobs, batch)
        probs = old.exp()
        torch.testing.assert_close((probs * values).sum(), entropy.detach())
        (grad,) = torch.autograd.grad((probs * grads).sum(), logits, retain_graph=True)
        torch.testing.assert_close(grad, exact)
    assert EntropyConfig().coef == 0.0
