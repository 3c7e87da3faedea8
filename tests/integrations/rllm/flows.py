"""Workflows, agents and engines for the tests, on the scripted policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from typing_extensions import override

from tinsmith.integrations.rllm.engines.base import SnapshotEngine
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rllm import (
    Action,
    AgentWorkflowEngine,
    BaseAgent,
    BaseEnv,
    Episode,
    RewardOutput,
    Step,
    Trajectory,
    Workflow,
)
from tinsmith.testing import ScriptedSnapshot

TASK = {"question": "yes or no?", "right": "yes"}


def engine(*replies: str, **sampling: Any) -> SnapshotEngine:
    """An engine on a policy of version 3 that samples `replies` with equal probability."""
    bound = SnapshotEngine(SamplingConfig(**sampling))
    bound.bind(ScriptedSnapshot(replies, np.zeros(len(replies)), 3), seed=7)
    return bound


def is_right(task: dict[str, Any], action: Any) -> RewardOutput:
    """1 for the text of the task's `right`."""
    text = action.action if isinstance(action, Action) else action
    return RewardOutput(reward=float(text == task["right"]), is_correct=text == task["right"])


class TwoSolvers(Workflow):
    """Two solvers and a judge, with rewards by name."""

    @override
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        self.reset(task, uid)
        messages = [{"role": "user", "content": task["question"]}]
        outputs = await asyncio.gather(
            *(self.rollout_engine.get_model_response(messages, application_id=uid) for _ in range(2))
        )
        solvers = [self.trajectory("solver", messages, output) for output in outputs]
        judge_messages = [{"role": "user", "content": "which?"}]
        judge = self.trajectory("judge", judge_messages, await self.rollout_engine.get_model_response(judge_messages))
        solver_acc = sum(solver.steps[0].reward or 0.0 for solver in solvers) / 2
        right = judge.steps[0].reward == 1.0
        return Episode(
            id=uid,
            task=task,
            is_correct=right,
            trajectories=[*solvers, judge],
            metrics={"solver_acc": solver_acc, "judge_acc": float(right)},
        )

    def trajectory(self, name: str, messages: list[dict[str, Any]], output: Any) -> Trajectory:
        step = Step.from_model_output(output, messages, Action(action=output.content))
        step.reward = is_right(self.task, output.content).reward
        return Trajectory(name=name, task=self.task, steps=[step])


class FunctionFlow(Workflow):
    """Runs a function of (workflow, task, uid) given in the arguments."""

    def __init__(self, rollout_engine: Any, function: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(rollout_engine, **kwargs)
        self.function = function

    @override
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Any:
        return await self.function(self, task, uid)


class GuessAgent(BaseAgent):
    """Sends every observation as a user message; a step is added with the reply."""

    def __init__(self) -> None:
        self.reset()

    @property
    @override
    def chat_completions(self) -> list[dict[str, Any]]:
        return self.messages

    @property
    @override
    def trajectory(self) -> Trajectory:
        return self.steps

    @override
    def update_from_env(self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any) -> None:
        if self.steps.steps:
            self.steps.steps[-1].reward, self.steps.steps[-1].done = reward, done
        self.messages.append({"role": "user", "content": str(observation)})

    @override
    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self.messages.append({"role": "assistant", "content": response})
        self.steps.steps.append(Step(chat_completions=self.messages, action=response))
        return Action(action=response)

    @override
    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.steps = Trajectory(name="guesser")


class GuessEnv(BaseEnv):
    """Ends at the right answer."""

    def __init__(self) -> None:
        self.task: dict[str, Any] = {}

    @override
    def reset(self, task: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.task = task or {}
        return self.task.get("question", ""), {}

    @override
    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        right = action.action == self.task["right"]
        return "wrong", float(right), right, {}


def episodes(flow: type[Workflow], args: dict[str, Any], model: Any, count: int = 4, **more: Any) -> list[Episode]:
    """Episodes of TASK."""
    runner = AgentWorkflowEngine(flow, args, model, **{"retry_limit": 1, **more})
    return asyncio.run(runner.execute_tasks([TASK] * count, ["t"] * count))
