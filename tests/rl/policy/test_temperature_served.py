"""Logprobs of replies at temperature 0.7 on a real engine, against transformers in float64."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.sampling import SamplingConfig, recomputing
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.policy.trainer import UpdateResult
from tinsmith.rl.types import Group, Rollout, Task, Turn
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.usefixtures("forked_programs")

PROMPT = (5, 9, 17, 3)
WARM = SamplingConfig(temperature=0.7, max_tokens=6)


def reference(folder: Path, turn: Turn, temperature: float) -> np.ndarray:
    """Logprobs of the reply under softmax(logits / temperature), float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokens = torch.tensor([[*turn.prompt, *turn.tokens]])
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1] / temperature
    values = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
    return values[-len(turn.tokens) :].numpy()


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_loss_at_temperature_07_equals_the_reference(loss, tiny, tmp_path):
    config = AlgorithmConfig.model_validate(
        {"type": "rloo", "loss": {"type": loss}, "kl": {"type": "none", "coef": 0}, "aggregate": "token_sum"}
    )

    async def work(address: tuple[str, str]) -> tuple[Sequence[Turn], UpdateResult]:
        policy = await TinkerTrainer.connect(ModelConfig(name="tiny", rank=4), *address, seed=1)
        snapshot = (await policy.snapshot()).around(recomputing(config.recomputes))
        turns = await snapshot.sample(PROMPT, count=3, seed=2, sampling=WARM)
        rollouts = tuple(Rollout.single((turn,), float(at)) for at, turn in enumerate(turns))
        scorer = Algorithm(config, policy.models.extensions, {}, 0)
        update = await scorer.score_part(1, [Group(task=Task(id="t", messages=()), rollouts=rollouts)])
        result = (await policy.train([update], OptimizerConfig(), 1e-3))[0]
        await policy.models.close()
        return turns, result

    folder = tiny("llama")
    with embedded(ServeConfig(models=(f"tiny={folder}",), threads=1, dtype="float32", data=tmp_path)) as address:
        turns, result = asyncio.run(work(address))
    expected = 0.0
    for turn, advantage in zip(turns, (-1.5, 0.0, 1.5), strict=True):
        policy, sampler = reference(folder, turn, 1.0), reference(folder, turn, 0.7)
        old = sampler if loss == "importance_sampling" else policy
        np.testing.assert_allclose(turn.logprobs, old, atol=2e-5)
        expected -= advantage * float(np.exp(policy - old).sum())
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
