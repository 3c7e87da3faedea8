"""A reward model: the token that it is trained on is the token that the reward reads."""

from __future__ import annotations

import asyncio
import json
import math

import numpy as np
import pytest

from tests.rl.rewards.test_rewards import said
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.data.demonstrations import Demonstrations, DemonstrationsConfig
from tinsmith.rl.policy.sampling import ModelVersion, SampleRequest, SampleResult, Snapshot, encoded
from tinsmith.rl.rewards import make_reward
from tinsmith.rl.types import Message, Task
from tinsmith.testing import CharacterCodec

TASK = Task(id="t/0", messages=(Message(role="user", content="3?"),))


def scored(probability: float, **settings) -> tuple[float, list[int]]:
    """The reward of the reply `three` by a model with this probability of the answer, and the tokens of the request."""
    requests: list[SampleRequest] = []

    async def sample(request: SampleRequest) -> SampleResult:
        requests.append(request)
        return SampleResult(logprobs=np.array([math.log(probability)], np.float32))

    async def open_model(name: str) -> Snapshot:
        assert name == "tinker://rm"
        return model

    model = Snapshot(ModelVersion(version=0, chat=CharacterCodec(), sample=sample, open_model=open_model))
    reward = make_reward({"type": "reward_model", "model": "tinker://rm", **settings})
    value = asyncio.run(reward.judge(TASK, said("three"), model))
    assert isinstance(value, float)
    (request,) = requests
    return value, list(encoded(request.prompt, CharacterCodec()).tokens)


@pytest.mark.parametrize("words", [{}, {"question": "Right?", "answer": "no"}])
def test_reward_reads_the_token_of_the_training(tmp_path, words):
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"question": "3?", "yes": "three", "no": "four"}))
    source = {"type": "jsonl", "path": str(tmp_path / "pairs.jsonl"), "chosen": "{yes}", "rejected": "{no}"}
    settings = DemonstrationsConfig.model_validate({"data": source})
    algorithm = AlgorithmConfig.model_validate({"type": "bradley_terry", "loss": {"type": "bradley_terry", **words}})
    assert algorithm.learns_from == "pairs"
    assert not algorithm.loss_reads_reference
    chosen, rejected = Demonstrations(
        settings, settings.load(), {"": ()}, CharacterCodec(), 0, pairs=True, verdict=algorithm.verdict
    ).draw(1)
    value, tokens = scored(0.8, **words)
    assert value == pytest.approx(math.log(4), rel=1e-5)
    assert tokens == [*chosen.tokens, chosen.targets[-1]]
    for row in (chosen, rejected):
        assert row.mask.nonzero()[0].tolist() == [len(row.mask) - 1]
    assert chosen.tokens.tolist() != rejected.tokens.tolist()


def test_reward_of_a_certain_answer_is_finite():
    assert scored(1.0)[0] == pytest.approx(-math.log(1e-9), rel=1e-3)
