"""Rewards compared in worker processes: the same scores, a time limit, a free event loop and a silent terminal."""

from __future__ import annotations

import asyncio
import io
import signal
import time
from collections.abc import Sequence

import numpy as np
import psutil
import pytest
from rich.console import Console

from tests.rl.rewards.test_rewards import answer, said
from tests.rl.scoring.test_arithmetic import least_seconds
from tests.rl.scripted_run import rows, scripted, settings
from tinsmith.rl.data.sources import ReasoningGym
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rewards.base import Reward, Score
from tinsmith.rl.rewards.format import THINK_ANSWER, matches
from tinsmith.rl.rewards.gym import ReasoningGymScore
from tinsmith.rl.rewards.mathematics import Math, MathBoxed, MathVerify
from tinsmith.rl.run.loop import train
from tinsmith.rl.scoring.pool import ScoringPool
from tinsmith.rl.types import Task
from tinsmith.testing import ScriptedSnapshot

POLICY = ScriptedSnapshot(("",), np.zeros(1), 0)
SLOW = r"so it is \boxed{9^{9^{9^{9}}}}"
"""math-verify computes this number, or would."""
COMPARE = "tinsmith.rl.scoring.mathematics:compare"


async def pooled(reward: Reward, task: Task, *texts: str) -> list[Score]:
    """The score of each text, compared in one pool at the same time."""
    pool = ScoringPool(2)
    rewards = Rewards([reward], pool=pool)
    try:
        trajectories = [said(text).trajectories[0] for text in texts]
        return await asyncio.gather(*(rewards.score(task, trajectory, POLICY) for trajectory in trajectories))
    finally:
        await pool.close()


@pytest.mark.parametrize(
    ("reward", "task", "texts"),
    [
        (MathVerify(), answer(r"\frac{1}{2}"), (r"Thus $x = 0.5$.", "it is 53", "")),
        (Math(), answer("so\n#### 72"), ("<think>a</think><answer>72</answer>", "72", "<answer>71</answer>", "")),
        (MathBoxed(think=True), answer(r"\boxed{72}"), (r"\boxed{144/2}", r"<think></think>\boxed{7}", "72")),
    ],
    ids=lambda value: value.title if isinstance(value, Reward) else "",
)
def test_scores_are_those_of_this_process(reward, task, texts):
    assert_scored_as_here(reward, task, texts)


def test_scores_of_reasoning_gym_are_those_of_this_process():
    task = ReasoningGym(dataset="basic_arithmetic", size=3).load()[1]
    texts = (f"<answer>{task.answer}</answer>", "<answer>x</answer>", task.answer)
    assert_scored_as_here(ReasoningGymScore(tag="answer"), task, texts)


def assert_scored_as_here(reward: Reward, task: Task, texts: Sequence[str]) -> None:
    scores = asyncio.run(pooled(reward, task, *texts))
    for score, text in zip(scores, texts, strict=True):
        here = reward.score(task, text)
        assert (score.value, score.correct) == (here.value, here.correct)


def test_slow_replies_are_wrong_and_leave_the_event_loop_free(capfd):
    turns = 0

    async def watch() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    async def work() -> tuple[list[Score], int, float]:
        nonlocal turns
        pool = ScoringPool(2)
        rewards = Rewards([Math(timeout=1)], pool=pool)
        watcher = asyncio.create_task(watch())
        (trajectory,) = said(SLOW).trajectories
        try:
            await asyncio.gather(*(pool.call(COMPARE, "1", "1", seconds=100) for _ in range(2)))  # both have started
            turns, begin = 0, time.monotonic()
            scores = await asyncio.gather(*(rewards.score(answer("72"), trajectory, POLICY) for _ in range(4)))
            return scores, turns, time.monotonic() - begin
        finally:
            watcher.cancel()
            await pool.close()

    slow, turns_meanwhile, seconds = asyncio.run(work())
    assert [(score.value, score.correct) for score in slow] == [(-0.1, False)] * 4
    assert seconds > 2  # two rounds of two processes, each of one second
    assert turns_meanwhile > 20  # not a limit of the longest pause, which a busy machine makes too
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""


def test_only_the_tagged_text_is_compared():
    (right,) = asyncio.run(pooled(Math(timeout=100), answer("72"), f"<answer>72</answer>{SLOW}"))
    assert (right.value, right.correct) == (0.9, True)


def test_time_limit_holds_in_this_process_too(own_log):
    begin = time.monotonic()
    result = Math(timeout=1).score(answer("72"), "$10000000!$")
    assert (result.value, result.correct) == (-0.1, False)
    assert time.monotonic() - begin < 100
    assert [record for record in own_log.records if not record.name.startswith("tinker")] == []
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_unreadable_answer_is_an_error():
    with pytest.raises(ValueError, match="math-verify cannot read the answer '' of t/0"):
        asyncio.run(pooled(MathVerify(), answer(""), "1"))


def test_default_format_is_matched_in_linear_time():
    reply = "<think> a </think> <answer> 1 </answer>\n" * 2_000
    replies = reply, reply + "x", "<think>" * 5_000 + "</answer>"

    def match() -> list[bool]:
        return [matches(THINK_ANSWER, text) for text in replies]

    assert match() == [True, False, False]
    assert least_seconds(match) < 0.2


def test_run_scores_in_worker_processes_and_ends_them(tmp_path):
    children = set(psutil.Process().children(recursive=True))
    seen: set[psutil.Process] = set()

    async def remember_children() -> None:
        while True:
            seen.update(set(psutil.Process().children(recursive=True)) - children)
            await asyncio.sleep(0.05)

    async def work() -> None:
        watcher = asyncio.create_task(remember_children())
        config = settings(tmp_path, steps=2, rewards=[{"type": "math_verify"}], eval={"every": 0})
        await train(config, scripted(tmp_path), Console(file=io.StringIO()))
        watcher.cancel()

    asyncio.run(work())
    assert seen
    assert not any(process.is_running() for process in seen)
    scored = [row for row in rows(tmp_path) if "reward/math_verify" in row]
    assert [row["reward/math_verify"] for row in scored] == [0.0, 0.0]
