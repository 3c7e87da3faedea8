"""Environments of verifiers 0.1.9 to 0.3, run against scripted replies. Skipped where no such version is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rl.workflows.test_workflows import policy
from tinsmith.errors import ConfigError
from tinsmith.integrations.verifiers.legacy import VerifiersLegacyEnvironment, require_legacy
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.training_rows import rows_from_trajectory
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import Rollout
from tinsmith.rl.workflows.base import WorkflowContext

SUMS = str(Path(__file__).parent / "packages" / "legacy_sums.py")


@pytest.fixture(autouse=True)
def legacy_version() -> None:
    try:
        require_legacy()
    except ConfigError as error:
        pytest.skip(str(error))


def rollouts(environment: VerifiersLegacyEnvironment, replies: Sequence[str], count: int = 4) -> tuple[Rollout, ...]:
    async def main() -> tuple[Rollout, ...]:
        endpoint = AgentEndpoint()
        context = WorkflowContext(sampling=SamplingConfig(max_tokens=5), rewards=Rewards([]), agent_endpoint=endpoint)
        try:
            return await environment.make(context).run(environment.tasks()[1], policy(*replies), count=count, seed=5)
        finally:
            await endpoint.close()

    return asyncio.run(main())


def test_rows_are_tasks_and_the_eval_dataset_is_held_out():
    environment = VerifiersLegacyEnvironment(id=SUMS, args={"size": 4})
    tasks, held_out = environment.tasks(), environment.held_out_tasks()
    assert [len(tasks), tasks[2].answer, tasks[2].messages[-1].content] == [4, "3", "2 + 1?"]
    assert held_out is not None
    assert [task.answer for task in held_out] == ["14"]


def test_rubric_gives_rewards_and_metrics():
    sampled = rollouts(VerifiersLegacyEnvironment(id=SUMS), ["2", "three"])
    assert {rollout.text for rollout in sampled} == {"2", "three"}
    for rollout in sampled:
        right = float(rollout.text == "2")
        assert (rollout.reward, dict(rollout.reward_parts)) == (right, {"exact": right})
        assert rollout.metrics["length"] == len(rollout.text)
        (turn,) = rollout.turns
        assert (turn.version, len(turn.logprobs)) == (3, len(turn.tokens))


def test_sampling_and_template_are_those_of_the_run():
    (rollout,) = rollouts(VerifiersLegacyEnvironment(id=SUMS), ["much too long"], count=1)
    (turn,) = rollout.turns
    assert (turn.text, turn.stop, len(turn.tokens)) == ("much ", "length", 5)
    assert "".join(map(chr, turn.prompt)) == "Reply with the sum.1 + 1?"


def test_turns_of_a_conversation_are_one_row():
    (rollout,) = rollouts(VerifiersLegacyEnvironment(id=SUMS, args={"turns": 3}), ["2"], count=1)
    (row,) = rows_from_trajectory(rollout.trajectories[0])
    assert "".join(map(chr, row.targets[row.mask])) == "2\0" * 3
    assert rollout.termination == "max_turns"


def test_group_reward_compares_the_group():
    sampled = rollouts(VerifiersLegacyEnvironment(id=SUMS, args={"group": True}), ["2", "four"])
    for rollout in sampled:
        assert rollout.reward == {"2": 1.0, "four": 0.5}[rollout.text]


def test_reward_that_raises_fails_its_rollout_alone():
    sampled = rollouts(VerifiersLegacyEnvironment(id=SUMS), ["2", "crash"])
    assert {(rollout.text, rollout.reward, rollout.error) for rollout in sampled} == {
        ("2", 1.0, ""),
        ("crash", 0.0, "reward: exact: OSError: the scorer is gone (packages/legacy_sums.py:15)"),
    }


def test_unknown_argument_is_refused():
    with pytest.raises(ConfigError, match="unknown"):
        VerifiersLegacyEnvironment(id=SUMS, args={"unknown": 1}).tasks()
