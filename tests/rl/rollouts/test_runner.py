"""Groups run within time limits, failed rollouts are retried, and the slowest groups can be cancelled."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.rl.scripted_run import settings
from tinsmith.rl.policy.request_limit import RequestLimit
from tinsmith.rl.rollouts.runner import CANCELLED, Oversampling, RolloutConfig, RolloutRunner
from tinsmith.rl.types import Group, Rollout, Task, Turn
from tinsmith.testing import ScriptedSnapshot, run_virtually

GOOD = Rollout.single((Turn(prompt=(1,), tokens=(2,), logprobs=(0.0,), text="", stop="stop"),), 1.0)


STILL = ScriptedSnapshot(("",), np.zeros(1), 7)


class Timed:
    """A workflow that takes the seconds in the task's answer; `fail` raises, `half` fails the second rollout once."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    async def run(self, task: Task, policy, *, count: int, seed: int) -> tuple[Rollout, ...]:
        self.calls.append((task.answer, count, seed))
        if task.answer == "fail":
            raise ValueError("no")
        if task.answer == "half":
            first = sum(answer == "half" for answer, *_ in self.calls) == 1
            return (GOOD, *[Rollout(error="odd") if first else GOOD] * (count - 1))
        await asyncio.sleep(float(task.answer))
        return (GOOD,) * count


def timed(
    answers: list[str], *, workflow: Timed | None = None, size: int = 2, over=None, **config
) -> tuple[list[Group], float]:
    """The groups of one task per answer, and the seconds that they took, on a virtual clock."""
    tasks = [Task(id=str(at), messages=(), answer=answer) for at, answer in enumerate(answers)]
    runner = RolloutRunner(RolloutConfig(**config), RequestLimit(100))
    seeds = range(100, 100 + len(tasks))

    async def main() -> tuple[list[Group], float]:
        groups = await runner.run_groups(workflow or Timed(), tasks, STILL, size=size, seeds=seeds, over=over)
        return list(groups), asyncio.get_running_loop().time()

    return run_virtually(main())


def rolled(answers: list[str], **how) -> list[Group]:
    """The groups of one task per answer."""
    return timed(answers, **how)[0]


def errors(group: Group) -> list[str]:
    """The error of each rollout."""
    return [rollout.error for rollout in group.rollouts]


def test_attempt_over_the_timeout_fails():
    quick, slow = rolled(["0", "5"], timeout=0.05)
    assert errors(quick) == ["", ""]
    assert errors(slow) == ["timed out after 0.05 seconds"] * 2
    assert quick.version == slow.version == 7


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        (Rollout.single(GOOD.turns, math.nan, reward_parts={"brief": 1.0, "taste": math.nan}), "taste is nan"),
        (Rollout.single(GOOD.turns, -math.inf, reward_parts={"brief": 1.0}), "the reward of policy is -inf"),
        (Rollout.single((*GOOD.turns, replace(GOOD.turns[0], reward=math.inf)), 1.0), "turn 2 is inf"),
    ],
    ids=["part", "sum", "turn"],
)
def test_rollout_with_non_finite_reward_fails(odd, problem):
    class Odd(Timed):
        async def run(self, task, policy, *, count, seed):
            return (odd, *[GOOD] * (count - 1))

    (group,) = rolled(["0"], workflow=Odd())
    assert errors(group) == [f"reward: {problem}, and must be a finite number", ""]
    assert group.rewards == (1.0,)


def test_timeout_excludes_waiting_for_other_calls():
    tasks = [Task(id=str(at), messages=(), answer="0.1") for at in range(6)]
    runner = RolloutRunner(RolloutConfig(timeout=0.5, concurrency=1), RequestLimit(9))
    groups = run_virtually(runner.run_groups(Timed(), tasks, STILL, size=1, seeds=range(6)))
    assert [errors(group) for group in groups] == [[""]] * 6


def test_failed_rollouts_are_retried_with_another_seed():
    workflow = Timed()
    (group,) = rolled(["half"], workflow=workflow, size=3, retries=2)
    assert errors(group) == ["", "", ""]
    assert [(count, seed == 100) for _, count, seed in workflow.calls] == [(3, True), (2, False)]


def test_retries_are_bounded():
    workflow = Timed()
    (group,) = rolled(["fail"], workflow=workflow, retries=2)
    assert all(error.startswith("ValueError: no (rollouts/test_runner.py:") for error in errors(group))
    assert len({seed for *_, seed in workflow.calls}) == len(workflow.calls) == 3


@pytest.mark.parametrize(
    ("partial", "expected"), [("keep", ["", "odd"]), ("drop", ["dropped with its group: odd", "odd"])]
)
def test_partial_keeps_or_drops_groups_with_failures(partial, expected):
    (group,) = rolled(["half"], partial=partial)
    assert errors(group) == expected
    assert len(group.rollouts[0].turns) == 1


def test_oversampling_cancels_the_slowest_groups():
    groups, seconds = timed(["0", "5", "0", "0"], over=Oversampling(ratio=0.25, wait=0.05))
    assert seconds == pytest.approx(0.05)
    assert [errors(group)[0] for group in groups] == ["", CANCELLED, "", ""]


def test_oversampling_waits_before_cancelling():
    groups = rolled(["0", "0.05", "0", "0"], over=Oversampling(ratio=0.25, wait=2))
    assert [errors(group) for group in groups] == [["", ""]] * 4


def test_oversampling_does_not_count_failed_groups():
    groups = rolled(["fail", "0.05", "0.05", "0.05"], over=Oversampling(ratio=0.5, wait=0.5))
    assert [errors(group)[0].partition(" (")[0] for group in groups] == ["ValueError: no", "", "", ""]


@pytest.mark.parametrize("partial", [True, False])
def test_oversampling_partial_keeps_finished_rollouts(partial):
    class Uneven(Timed):
        async def run(self, task, policy, *, count, seed):
            if task.answer == "uneven" and self.calls:
                await asyncio.sleep(5)
            self.calls.append((task.answer, count, seed))
            return (GOOD,) * count

    over = Oversampling(ratio=0.5, wait=0.01, partial=partial)
    first, _ = rolled(["uneven", "0"], workflow=Uneven(), over=over, split=1)
    error = "" if partial else f"dropped with its group: {CANCELLED}"
    assert errors(first) == [error, CANCELLED]


def test_timeout_ratio_follows_the_mean_after_warmup():
    async def main() -> list[float]:
        runner = RolloutRunner(RolloutConfig(timeout=9.0, timeout_ratio=3.0, timeout_warmup=2), RequestLimit(10))
        limits = [runner.limit]
        for _ in range(2):
            task = Task(id="0", messages=(), answer="0.02")
            await runner.run_groups(Timed(), [task], STILL, size=1, seeds=[1])
            limits.append(runner.limit)
        return limits

    first, second, third = run_virtually(main())
    assert first == second == 9.0
    assert third == pytest.approx(3 * 0.02)


def test_rejects_rollout_settings_unused_by_the_style(tmp_path):
    with pytest.raises(ValueError, match=r"rollout\.over\.ratio is not used with sync\.style: fixed"):
        settings(tmp_path, rollout={"over": {"ratio": 0.5}})
    with pytest.raises(ValueError, match=r"sync\.publish_every is not used with sync\.style: fixed"):
        settings(tmp_path, sync={"publish_every": 2})
