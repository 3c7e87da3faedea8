"""Replies sampled at another temperature: the logprobs that losses read, and the gradients, in float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.rl.algorithms.helpers import columns, run
from tests.rl.algorithms.test_loss_dispatch import OURS, grads
from tests.rl.scripted_run import settings
from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.policy.sampling import SamplingConfig, recomputing
from tinsmith.rl.types import Group, Rollout, Task, Turn
from tinsmith.testing import ScriptedSnapshot

LOGITS = np.array([0.4, -0.3, 1.1])
REWARDS = np.array([0.0, 1.0, 0.25])
POLICY = np.exp(LOGITS) / np.exp(LOGITS).sum()
TEMPERED = np.exp(LOGITS / 0.7) / np.exp(LOGITS / 0.7).sum()
WARM = SamplingConfig(temperature=0.7)
RATIOS = {
    "exact": [{"type": "grpo"}, {"type": "rloo", "correction": {"type": "tis"}}],
    "none": [{"type": "opmd"}, {"type": "raft"}, {"type": "rloo", "loss": {"on_policy": True}}],
    "bounded": [
        *({"type": name} for name in ("grpo_std", "gspo", "cispo", "sapo", "topr", "sppo", "rec", "mix", "dapo")),
        {"type": "grpo", "kl_penalty": {"type": "k1", "coef": 0.1}},
        {"type": "jsd", "teacher": "large", "loss": {"on_policy": True}},
    ],
}


def algorithm(**values: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(values)


def turns(recomputes: bool, count: int = 4) -> tuple[Turn, ...]:
    """Replies of the policy at temperature 0.7."""
    snapshot = ScriptedSnapshot(("no", "yes", "perhaps"), LOGITS, 3).around(recomputing(lambda _: recomputes))
    return run(snapshot.sample((1, 2), count=count, seed=5, sampling=WARM))


def replies(seen: tuple[Turn, ...]) -> list[int]:
    return [("no", "yes", "perhaps").index(turn.text) for turn in seen]


@pytest.mark.parametrize("recomputes", [False, True])
def test_replies_carry_the_chosen_logprobs(recomputes):
    seen = turns(recomputes)
    assert len(set(replies(seen))) > 1
    probs = POLICY if recomputes else TEMPERED
    for turn, reply in zip(seen, replies(seen), strict=True):
        assert turn.logprobs == pytest.approx([np.log(probs[reply]), *[0.0] * (len(turn.tokens) - 1)], abs=1e-6)
        assert turn.version == 3


@pytest.mark.parametrize(
    ("kind", "values"), [(kind, values) for kind, cases in RATIOS.items() for values in cases], ids=str
)
def test_auto_recomputes_logprobs_for_bounded_ratios(kind, values):
    config = algorithm(**values)
    assert config.sampler_ratio == kind
    nucleus, greedy = SamplingConfig(top_p=0.9), SamplingConfig(temperature=0)
    assert config.recomputes(WARM) == (kind == "bounded")
    assert config.recomputes(nucleus) == config.recomputes(greedy) == (kind != "none")
    assert not config.recomputes(SamplingConfig())
    assert not algorithm(**values, old_logprobs="sampler").recomputes(WARM)
    always = algorithm(**values, old_logprobs="recomputed")
    assert [always.recomputes(sampling) for sampling in (WARM, nucleus, SamplingConfig())] == [True, True, False]


def test_importance_weights_at_another_temperature_are_unbiased():
    """Over all replies, weighted by the probability of sampling them, the gradient is that of the expected reward."""
    expected = POLICY * (REWARDS - POLICY @ REWARDS)  # d E[r] / d logits
    total = np.zeros(3)
    for reply in range(3):
        gradient = policy_gradient({"type": "grpo", "advantage": {"type": "reinforce"}}, [reply], TEMPERED)
        total += TEMPERED[reply] * gradient
    np.testing.assert_allclose(total, expected, rtol=1e-6)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_gradient_at_temperature_07_equals_the_reference(loss):
    """For every pair of replies: weights p / q for importance_sampling, ratios of 1 for losses that bound them."""
    values = {"type": "rloo", "loss": {"type": loss}, "aggregate": "token_sum", "kl": {"type": "none", "coef": 0}}
    recomputes = algorithm(**values).recomputes(WARM)
    assert recomputes == (loss != "importance_sampling")
    for pair in product(range(3), repeat=2):
        first, second = (REWARDS[reply] for reply in pair)
        expected = np.zeros(3)
        for reply, advantage in zip(pair, (first - second, second - first), strict=True):
            weight = 1.0 if recomputes else POLICY[reply] / TEMPERED[reply]
            expected += weight * advantage * (np.eye(3)[reply] - POLICY)
        gradient = policy_gradient(values, list(pair), POLICY if recomputes else TEMPERED)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)


def policy_gradient(values: dict[str, Any], group: list[int], old: np.ndarray) -> np.ndarray:
    """- d loss / d logits of a group of one-token replies with these old probabilities, by the engine's formulas."""
    rollouts = tuple(
        Rollout.single(
            (Turn(prompt=(1,), tokens=(10 + reply,), logprobs=(float(np.log(old[reply])),), text="", stop="stop"),),
            float(REWARDS[reply]),
        )
        for reply in group
    )
    scorer = Algorithm(algorithm(**values, merge_replies=False), OURS, columns(), 0)
    update = run(scorer.score_part(1, [Group(task=Task(id="t", messages=()), rollouts=rollouts)]))
    chosen = [int(row.targets[-1]) - 10 for row in update.rows]
    logprobs = [torch.tensor([np.log(POLICY[reply])], requires_grad=True) for reply in chosen]
    pieces = [
        -float(grad[-1]) * (np.eye(3)[reply] - POLICY)
        for reply, grad in zip(chosen, grads(update, logprobs) if chosen else (), strict=True)
    ]
    return np.sum([np.zeros(3), *pieces], axis=0)


def test_importance_weights_refuse_restricted_sampling(tmp_path):
    for sampling, setting in (({"top_p": 0.9}, "top_p or top_k"), ({"temperature": 0}, "temperature 0")):
        with pytest.raises(ValueError, match=f"sampling with {setting} does not return .*old_logprobs to recomputed"):
            settings(tmp_path, sampling=sampling)
        settings(tmp_path, sampling=sampling, algorithm={"type": "rloo"})
        for choice in ("sampler", "recomputed"):
            settings(tmp_path, sampling=sampling, algorithm={"type": "grpo", "old_logprobs": choice})
    settings(tmp_path, sampling={"temperature": 0.7})
