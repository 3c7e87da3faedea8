"""Workflows of several roles: conversations by role, rewards, early ends and failures."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from pydantic import ValidationError

from tests.rl.scripted_run import rows, run, settings
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rewards.base import Score
from tinsmith.rl.rewards.custom import CustomReward
from tinsmith.rl.rewards.format import Format
from tinsmith.rl.types import Message, Rollout, Task
from tinsmith.rl.workflows.base import WorkflowContext, WorkflowPolicy
from tinsmith.rl.workflows.conversation import Terminated
from tinsmith.rl.workflows.custom import CustomConfig
from tinsmith.testing import ScriptedSnapshot, run_virtually

TASK = Task(id="t/0", messages=(Message(role="user", content="yes or no?"),), answer="yes")


class SolverJudge:
    """`solutions` solvers answer at the same time, and a judge says which answer is right."""

    def __init__(self, solutions: int = 2) -> None:
        self.solutions = solutions

    async def run(self, task: Task, policy: WorkflowPolicy) -> Rollout:
        solvers = [policy.conversation("solver") for _ in range(self.solutions)]
        answers = await asyncio.gather(*(solver.say(*task.messages) for solver in solvers))
        for solver, answer in zip(solvers, answers, strict=True):
            solver.reward = float(answer.text == task.answer)
        judge = policy.conversation("judge")
        await judge.say(" ".join(answer.text for answer in answers))
        judge.reward = 0.25
        policy.store["rollouts"] = policy.store.get("rollouts", 0) + 1
        return policy.rollout(correct=True, metrics={"count": policy.store["rollouts"]})


class Ending:
    """Samples a reply, then ends in the given way."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def run(self, task: Task, policy: WorkflowPolicy) -> Rollout | None:
        helper = policy.conversation("helper", model="big")
        await helper.say(*task.messages)
        solver = policy.conversation("solver")
        await solver.say(*task.messages)
        match self.how:
            case "turns":
                raise Terminated("max_turns")
            case "hang":
                await asyncio.sleep(60)
            case "raise":
                raise RuntimeError("the judge's endpoint is down")
            case "nan":
                solver.reward = math.nan
                return policy.rollout()
            case "other":
                return 1.0  # type: ignore[return-value]
            case "early":
                return Rollout()
            case "credit":
                solver.credit(0.5)
        return None


def play(
    config: CustomConfig, *replies: str, count: int = 1, rewards: Rewards | None = None, **sampling
) -> tuple[Rollout, ...]:
    """Rollouts of TASK by a policy that samples `replies`."""
    context = WorkflowContext(
        sampling=SamplingConfig(**sampling), rewards=rewards or Rewards([]), agent_endpoint=AgentEndpoint()
    )
    policy = ScriptedSnapshot(replies, np.zeros(len(replies)), 3)
    return run_virtually(config.make(context).run(TASK, policy, count=count, seed=5))


def test_every_conversation_is_a_trajectory_of_its_role():
    first, second = play(CustomConfig(path=SolverJudge, args={"solutions": 3}), "yes", "no", count=2)
    assert [each.role for each in first.trajectories] == ["solver", "solver", "solver", "judge"]
    for rollout in (first, second):
        answers = [each.text for each in rollout.trajectories[:3]]
        assert [each.reward for each in rollout.trajectories] == [float(text == "yes") for text in answers] + [0.25]
        judge_prompt = "".join(map(chr, rollout.trajectories[3].turns[0].prompt))
        assert judge_prompt == " ".join(answers)
    assert (first.correct, first.metrics, second.metrics) == (True, {"count": 1}, {"count": 2})


def test_conversations_of_a_rollout_sample_with_different_seeds():
    (rollout,) = play(CustomConfig(path=SolverJudge, args={"solutions": 64}), "yes", "no")
    assert {each.text for each in rollout.trajectories[:64]} == {"yes", "no"}


def test_path_and_object_of_a_class_are_the_same():
    by_path = play(CustomConfig(path=f"{__name__}:SolverJudge"), "yes", "no", count=4)
    assert by_path == play(CustomConfig(path=SolverJudge()), "yes", "no", count=4)
    recorded = CustomConfig(path=SolverJudge, args={"solutions": 2}).model_dump(mode="json")
    assert (recorded["path"], recorded["args"]) == (f"{__name__}:SolverJudge", {"solutions": 2})


def test_rewards_of_the_run_are_added_by_role():
    rewards = Rewards([Format(pattern="yes", role="solver"), Format(pattern=".*", name="any", weight=2.0)])
    (rollout,) = play(CustomConfig(path=SolverJudge), "yes", rewards=rewards)
    assert [each.reward for each in rollout.trajectories] == [1 + 1 + 2, 1 + 1 + 2, 0.25 + 2]
    assert rollout.reward_parts == {"solver/format": 1.0, "solver/any": 1.0, "judge/any": 1.0}


def wrong(task: Task, rollout: Rollout) -> Score:
    return Score(value=1.0, correct=False)


def test_workflow_says_what_is_right_before_rewards_do():
    (rollout,) = play(CustomConfig(path=SolverJudge), "yes", rewards=Rewards([CustomReward(path=wrong)]))
    assert rollout.correct is True
    (rollout,) = play(
        CustomConfig(path=Ending, args={"how": "credit"}), "yes", rewards=Rewards([CustomReward(path=wrong)])
    )
    assert rollout.correct is False


@pytest.mark.parametrize(
    ("how", "termination", "error"),
    [
        ("turns", "max_turns", ""),
        ("hang", "timeout", ""),
        ("credit", "done", ""),
        ("raise", "error", "RuntimeError: the judge's endpoint is down"),
        ("other", "error", "the workflow returned a reward for 2 conversations; set `reward` of each, or return none"),
        ("early", "error", "the workflow sampled no reply"),
        ("none", "error", "reward: neither the workflow nor the run's rewards gave one to solver"),
    ],
)
def test_rollouts_end_early_or_fail(how: str, termination: str, error: str):
    (rollout,) = play(CustomConfig(path=Ending, args={"how": how}, timeout=0.2), "yes")
    assert (rollout.termination, rollout.error.partition(" (workflows/")[0]) == (termination, error)
    if not error:
        assert [(each.role, each.reward) for each in rollout.trajectories] == [
            ("helper", 0.0),
            ("solver", 0.5 if how == "credit" else 0.0),
        ]
        assert [turn.model for turn in rollout.turns] == ["big", ""]


def test_prompt_that_is_too_long_ends_the_rollout():
    (rollout,) = play(CustomConfig(path=SolverJudge), "a long answer", max_prompt_tokens=12)
    assert (rollout.termination, [each.role for each in rollout.trajectories]) == ("max_prompt", ["solver", "solver"])


def test_classes_with_another_signature_are_refused():
    class NoTask:
        async def run(self) -> None:
            """Takes no task."""

    for path, args, message in (
        (NoTask, {}, r"must be callable with \(task, policy\)"),
        (SolverJudge, {"judges": 2}, "has no argument 'judges'. It takes: solutions"),
        (TASK, {}, "neither an async function, nor a class"),
    ):
        with pytest.raises(ValidationError, match=message):
            CustomConfig(path=path, args=args)


def test_run_trains_both_roles_and_reports_them(tmp_path):
    change = {"workflow": {"type": "custom", "path": f"{__name__}:SolverJudge"}, "rewards": (), "eval": {}}
    run(settings(tmp_path, steps=2, groups_per_step=2, group_size=4, **change))
    (first, *_) = [row for row in rows(tmp_path) if row["step"] == 1]
    assert {"reward/solver/mean", "reward/judge/mean", "groups/judge/constant", "workflow/count"} <= first.keys()
    assert (first["reward/judge/mean"], first["groups/judge/constant"]) == (0.25, 1.0)
    assert first["tokens/judge"] > 0
