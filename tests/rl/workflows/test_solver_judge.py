"""examples/solver_judge: the judge's choice, rewards of both roles, and the run file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from examples.solver_judge.solver_judge import SolverJudge, choice, judge_prompt
from tinsmith.dialects import read_run
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import Message, Rollout, Task
from tinsmith.rl.workflows.base import WorkflowContext, WorkflowPolicy
from tinsmith.testing import ScriptedSnapshot

TASK = Task(id="t/0", messages=(Message(role="user", content="What is 1 + 1?"),), answer="2")


@pytest.mark.parametrize(
    ("reply", "chosen"),
    [
        ("1", 1), (" 2\n", 2), ("so <answer> 2 </answer>", 2), ("<ANSWER>1</ANSWER>", 1), ("3", 0), ("0", 0), ("-1", 0),
        ("01", 0), ("1.0", 0), ("²", 0), ("٢", 0), ("1. Because", 1), ("12", 0), ("Answer 1", 0), ("", 0),
        ("9" * 5000, 0),
    ],
)  # fmt: skip
def test_judge_chooses_an_existing_answer_or_none(reply: str, chosen: int):
    assert choice(reply, 2) == chosen


def test_judge_sees_the_answers_without_the_reasoning():
    prompt = judge_prompt(TASK, ["one and one\n<answer>2</answer>", "3"])
    assert "Problem: What is 1 + 1?" in prompt
    assert "Answer 1: 2\nAnswer 2: 3" in prompt
    assert "one and one" not in prompt


def played(*replies: str) -> list[Rollout]:
    """32 rollouts by a policy that samples `replies`, as solver and as judge."""
    policy, workflow = ScriptedSnapshot(replies, np.zeros(len(replies)), 0), SolverJudge({"type": "number"})
    context = WorkflowContext(sampling=SamplingConfig(), rewards=Rewards([]), agent_endpoint=AgentEndpoint())
    calls = (workflow.run(TASK, WorkflowPolicy(policy, context, seed)) for seed in range(32))

    async def main() -> list[Rollout]:
        return list(await asyncio.gather(*calls))

    return asyncio.run(main())


def test_judge_is_rewarded_for_the_answer_it_picks():
    rollouts = played("2", "1")
    for rollout in rollouts:
        first, second, judge = rollout.trajectories
        assert [each.role for each in rollout.trajectories] == ["solver", "solver", "judge"]
        assert [each.reward for each in (first, second)] == [float(each.text == "2") for each in (first, second)]
        assert judge.reward == (first, second)[int(judge.text) - 1].reward
        assert rollout.correct == (judge.reward == 1)
        assert rollout.metrics["solver_accuracy"] == (first.reward + second.reward) / 2
    assert {rollout.correct for rollout in rollouts} == {True, False}


def test_judge_without_a_valid_choice_gets_nothing():
    for rollout in played("7"):
        assert (rollout.trajectories[-1].reward, rollout.correct) == (0.0, False)


def test_run_file_is_valid(monkeypatch: pytest.MonkeyPatch):
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    assert read_run(root / "examples" / "solver_judge" / "arithmetic.yaml").settings.workflow.provides_rewards
