"""Solvers and a judge as a workflow of rLLM: solvers answer independently, and a judge picks one of their answers.

`solver_judge.py` is the same with Tinsmith's own classes.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from tinsmith.rllm import Episode, RewardFunction, RolloutEngine, Step, Trajectory, Workflow

NO_ANSWER = "no answer"
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_JUDGE_PROMPT = """You check answers to a problem.

Problem: {problem}

{answers}

Compare each answer with what the problem requires: the numbers it may use, how often, and the result. Pick the one \
that is right; if several are, the first of them. Write only its number, 1 to {count}, in <answer> </answer> tags."""


class Solver:
    """Answers the question of a task."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    async def solve(self, question: str) -> Trajectory:
        """A trajectory with one step, whose action is the answer in its tags."""
        messages = [{"role": "user", "content": question}]
        output = await self.engine.get_model_response(messages)
        answers = _TAGS.findall(output.content or "")
        action = f"<answer>{answers[-1].strip()}</answer>" if answers else NO_ANSWER
        return Trajectory(name="solver", steps=[Step.from_model_output(output, messages, action)])

    async def solve_several(self, question: str, count: int) -> list[Trajectory]:
        """Independent attempts."""
        return list(await asyncio.gather(*(self.solve(question) for _ in range(count))))


class Judge:
    """Picks one of several answers."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    async def pick(self, question: str, answers: list[str]) -> Trajectory:
        """A trajectory with one step, whose action is the answer that it picks; empty without a valid choice."""
        numbered = "\n".join(f"Answer {number}: {answer}" for number, answer in enumerate(answers, 1))
        prompt = _JUDGE_PROMPT.format(problem=question, answers=numbered, count=len(answers))
        messages = [{"role": "user", "content": prompt}]
        output = await self.engine.get_model_response(messages)
        number = chosen_number(output.content or "", len(answers))
        action = answers[number - 1] if number else ""
        return Trajectory(name="judge", steps=[Step.from_model_output(output, messages, action)])


def chosen_number(reply: str, count: int) -> int:
    """The number in the last tags, 1 to `count`; 0 for anything else, which is no choice."""
    texts = _TAGS.findall(reply)
    text = texts[-1].strip() if texts else ""
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,3}", text, re.ASCII) and int(text) <= count else 0


class SolverJudgeWorkflow(Workflow):
    """`n_solutions` solvers and a judge.

    A solver is rewarded for its answer, the judge for the answer that it picks. Solvers are compared with solvers of
    the same task, and judges with judges.
    """

    def __init__(
        self, rollout_engine: RolloutEngine, reward_function: RewardFunction, n_solutions: int = 2, **kwargs: Any
    ) -> None:
        super().__init__(rollout_engine, **kwargs)
        self.reward_function, self.n_solutions = reward_function, n_solutions
        self.solver, self.judge = Solver(rollout_engine), Judge(rollout_engine)

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        self.reset(task, uid)
        solvers = await self.solver.solve_several(task["question"], self.n_solutions)
        for trajectory in solvers:
            self.score(trajectory)
        judge = await self.judge.pick(task["question"], [trajectory.steps[0].action for trajectory in solvers])
        self.score(judge)
        correct = judge.reward == 1.0
        solved = sum(trajectory.reward or 0.0 for trajectory in solvers) / len(solvers)
        return Episode(
            id=uid,
            task=task,
            trajectories=[*solvers, judge],
            is_correct=correct,
            metrics={"solver_acc": solved, "judge_acc": float(correct)},
        )

    def score(self, trajectory: Trajectory) -> None:
        """Set the reward of the trajectory: that of its action."""
        reward = float(self.reward_function(self.task, trajectory.steps[0].action).reward)
        trajectory.reward = trajectory.steps[0].reward = reward
