"""An implicit reward is the score of dpo: its margin of a pair is that of the loss that trained the model."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from typing_extensions import override

from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.algorithms.loss_dispatch import tokens_of_rows
from tinsmith.rl.policy.sampling import (
    ModelVersion,
    PromptLogprobs,
    SampleRequest,
    SampleResult,
    Snapshot,
    encoded,
)
from tinsmith.rl.policy.training_rows import rows_from_trajectory
from tinsmith.rl.rewards import make_reward
from tinsmith.rl.types import Rollout, Task, Trajectory, Turn
from tinsmith.testing import CharacterCodec

TASK = Task(id="t/0", messages=())
FIRST = Turn(prompt=(65, 66), tokens=(67, 68, 69), logprobs=(-1.0,) * 3, text="CDE", stop="stop")
SECOND = Turn(prompt=(65, 66, 67, 68, 69, 70), tokens=(71,), logprobs=(-1.0,), text="G", stop="stop")


def logprob(name: str, before: tuple[int, ...], token: int) -> float:
    """A model's logprob of a token, which depends on all tokens before it."""
    return -0.01 * ((sum(before) * (3 if name else 7) + token) % 53) - 0.1


class OtherCodec(CharacterCodec):
    """Another tokenizer."""

    @override
    def decode(self, tokens):
        return super().decode([token + 1 for token in tokens])


def policy(*, other: str = "none") -> Snapshot:
    """A policy at a server whose model `other` has another tokenizer."""

    def model(name: str) -> Snapshot:
        async def sample(request: SampleRequest) -> SampleResult:
            tokens = encoded(request.prompt, CharacterCodec()).tokens
            assert isinstance(request.logprobs, PromptLogprobs)
            values = [logprob(name, tokens[:at], token) for at, token in enumerate(tokens)][1:]
            return SampleResult(logprobs=np.array(values[-(request.logprobs.last or 0) :], np.float32))

        async def open_model(name: str) -> Snapshot:
            return model(name)

        codec = OtherCodec() if name == other else CharacterCodec()
        return Snapshot(ModelVersion(version=0, chat=codec, sample=sample, open_model=open_model))

    return model("policy")


def reward(*turns: Turn, server: Snapshot | None = None, **settings) -> float:
    part = make_reward({"type": "implicit_reward", "model": "tinker://dpo", **settings})
    value = asyncio.run(part.judge(TASK, Rollout.single(turns), server or policy()))
    assert isinstance(value, float)
    return value


def by_hand(*turns: Turn) -> list[float]:
    """log p - log p_ref of each sampled token."""
    sampled = [(turn.prompt + turn.tokens[:at], token) for turn in turns for at, token in enumerate(turn.tokens)]
    return [logprob("tinker://dpo", *token) - logprob("", *token) for token in sampled]


@pytest.mark.parametrize("turns", [(FIRST,), (SECOND,), (FIRST, SECOND)])
def test_reward_is_the_log_ratio_of_the_sampled_tokens(turns):
    differences = by_hand(*turns)
    assert reward(*turns, beta=0.3) == pytest.approx(0.3 * sum(differences), abs=1e-6)
    assert reward(*turns, beta=0.3, per_token=True) == pytest.approx(0.3 * np.mean(differences), abs=1e-6)
    assert reward(*turns, replace(SECOND, model="other")) == pytest.approx(reward(*turns))
    assert reward(*turns, reference="tinker://start") == 0.0


def test_difference_of_rewards_is_the_margin_of_dpo():
    other = replace(FIRST, tokens=(80, 90), logprobs=(-1.0, -1.0))
    rows = []
    for kind, turn in (("chosen", FIRST), ("rejected", other)):
        (row,) = rows_from_trajectory(Trajectory(turns=(turn,)))
        tokens = (*row.tokens.tolist(), int(row.targets[-1]))
        reference = np.array([logprob("", tokens[:at], tokens[at]) for at in range(1, len(tokens))])
        rows.append(replace(row, kind=kind, columns={"reference": reference}))
    config = AlgorithmConfig.model_validate({"type": "dpo", "loss": {"beta": 0.2}})
    sampled = [
        (turn.prompt + turn.tokens[:at], token) for turn in (FIRST, other) for at, token in enumerate(turn.tokens)
    ]
    logprobs = np.array([logprob("tinker://dpo", *token) for token in sampled])
    metrics = config.loss.total(logprobs, tokens_of_rows(rows, config, 1))[1]
    assert reward(FIRST, beta=0.2) - reward(other, beta=0.2) == pytest.approx(float(metrics["pairs/margin"]), abs=1e-6)


def test_models_and_rollouts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="tinker://small has another tokenizer than the policy"):
        reward(FIRST, reference="tinker://small", server=policy(other="tinker://small"))
    with pytest.raises(ValueError, match="it sampled none"):
        reward(replace(FIRST, model="other"))
