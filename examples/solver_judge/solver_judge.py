"""A workflow of two roles: solvers answer a question independently, and a judge picks one of their answers.

Solvers are compared with solvers and the judge with judges of the same task, so both learn from one rollout.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith import Message, Rollout, Task, WorkflowPolicy, make_reward

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_PROMPT = """Here are {count} answers to a problem. Say which one is right.

Problem: {problem}

{answers}

Give only the number of the right answer, 1 to {count}; if several are right, that of the first."""


class SolverJudge:
    """`solutions` solvers and a judge, whose reply begins with `judge_prefix`.

    `reward` scores answers, as an entry of `rewards` in a run file does. A solver's reward is that of its answer; the
    judge's is that of the answer it picks, or 0 without a valid choice.
    """

    def __init__(self, reward: Mapping[str, Any], solutions: int = 2, judge_prefix: str = "") -> None:
        self.reward, self.solutions, self.judge_prefix = make_reward(reward), solutions, judge_prefix

    async def run(self, task: Task, policy: WorkflowPolicy) -> Rollout:
        solvers = [policy.conversation("solver") for _ in range(self.solutions)]
        replies = await asyncio.gather(*(solver.say(*task.messages) for solver in solvers))
        scores = [await policy.score(self.reward, task, reply.text) for reply in replies]
        for solver, score in zip(solvers, scores, strict=True):
            solver.reward = score.value
        judge = policy.conversation("judge")
        prefix = [Message(role="assistant", content=self.judge_prefix)] if self.judge_prefix else []
        verdict = await judge.say(judge_prompt(task, [reply.text for reply in replies]), *prefix)
        chosen = choice(verdict.text, self.solutions)
        judge.reward = scores[chosen - 1].value if chosen else 0.0
        correct = judge.reward >= 1
        solved = sum(score.value >= 1 for score in scores) / self.solutions
        return policy.rollout(correct=correct, metrics={"solver_accuracy": solved, "judge_accuracy": float(correct)})


def judge_prompt(task: Task, replies: Sequence[str]) -> str:
    """The judge's message: the problem and the numbered answers, without the solvers' reasoning."""
    answers = "\n".join(f"Answer {number}: {answer_of(reply)}" for number, reply in enumerate(replies, 1))
    return _PROMPT.format(count=len(replies), problem=task.messages[-1].content, answers=answers)


def answer_of(reply: str) -> str:
    """What stands in the reply's last answer tags, or the reply itself."""
    tagged = _TAGS.findall(reply)
    return (tagged[-1] if tagged else reply).strip()


def choice(reply: str, count: int) -> int:
    """The number that the judge's answer begins with, 1 to `count`; 0 if there is none, or another one."""
    number = re.match(r"[1-9][0-9]{0,3}(?![0-9]|[.,][0-9])", answer_of(reply))
    return int(number[0]) if number and int(number[0]) <= count else 0
