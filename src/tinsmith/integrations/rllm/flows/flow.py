"""Agent flows under the names of rLLM: a function with an OpenAI client of its own, and an evaluator that scores it.

    @rollout(name="solver")
    async def solve(task: Task, config: AgentConfig) -> None:
        client = AsyncOpenAI(base_url=config.base_url, api_key="EMPTY")
        messages = [{"role": "user", "content": task.instruction}]
        await client.chat.completions.create(model=config.model, messages=messages)

    @evaluator
    def correct(task: Task, episode: Episode) -> float: ...

`AgentTrainer(agent_flow=solve, evaluator=correct, …)` trains it. config.base_url samples the weights in training, and
its replies are recorded with their tokens; `flow_training.py` matches them with the steps of the flow.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial, update_wrapper
from typing import Any, overload

from typing_extensions import override

from tinsmith.errors import UserError
from tinsmith.integrations.rllm.flows.records import AgentConfig, EvalOutput, Task, episode_of, output_of
from tinsmith.integrations.rllm.flows.training import FlowOptions
from tinsmith.integrations.rllm.records import Episode
from tinsmith.rl.guards import event_loop
from tinsmith.rl.plugins import import_object
from tinsmith.rl.workflows.base import AdaptedWorkflow, WorkflowOptions


class AgentFlow(AdaptedWorkflow):
    """A function of (task, config) that samples the policy, made by `rollout`."""

    def __init__(self, function: Callable[..., Any], name: str = "solver") -> None:
        """`name` is the role of the trajectory, if the function returns none with a name."""
        update_wrapper(self, function)
        self._function, self.name = function, name

    async def arun(self, task: Task, config: AgentConfig, executor: Executor | None = None) -> Episode:
        """The episode of a task; a function that is not async runs in a thread."""
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(task, config)
        else:
            call = partial(self._function, task, config)
            result = await asyncio.get_running_loop().run_in_executor(executor, call)
        return episode_of(result, task, self.name)

    def run(self, task: Task, config: AgentConfig) -> Episode:
        """The episode of a task; the caller waits for it."""
        return event_loop.run(self.arun(task, config))

    def __call__(self, task: Task, config: AgentConfig) -> Any:
        """Call the function itself."""
        return self._function(task, config)

    @override
    def workflow_options(self, args: Mapping[str, Any]) -> WorkflowOptions:  # type: ignore[override]  # of the object
        if unknown := sorted(args.keys() - {"evaluator"}):
            raise ValueError(f"a flow has no argument {unknown[0]}; its arguments are evaluator")
        scorer = import_object(args.get("evaluator"))
        scorer = scorer if scorer is None or isinstance(scorer, Evaluator) else Evaluator(scorer)
        return FlowOptions(flow=self, evaluator=scorer)


class Evaluator:
    """A function of (task, episode) that scores a rollout, made by `evaluator`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self._function = function

    async def aevaluate(self, task: Task, episode: Episode, executor: Executor | None = None) -> EvalOutput:
        """The result for an episode; a function that is not async runs in a thread."""
        if inspect.iscoroutinefunction(self._function):
            return output_of(await self._function(task, episode))
        call = partial(self._function, task, episode)
        return output_of(await asyncio.get_running_loop().run_in_executor(executor, call))

    def evaluate(self, task: Task, episode: Episode) -> EvalOutput:
        """The result for an episode; the caller waits for it."""
        return event_loop.run(self.aevaluate(task, episode))

    def __call__(self, task: Task, episode: Episode) -> Any:
        """Call the function itself."""
        return self._function(task, episode)


@overload
def rollout(fn: Callable[..., Any]) -> AgentFlow: ...
@overload
def rollout(*, name: str = "solver") -> Callable[[Callable[..., Any]], AgentFlow]: ...
def rollout(fn: Any = None, *, name: str = "solver", register: str | None = None) -> Any:
    """Decorator: a function of (task, config) as an agent flow. It may be async.

    It returns an Episode, a Trajectory or a list of them, the answer as text, a mapping of artifacts, or nothing; the
    recorded replies are the steps of trajectories without steps.
    """
    _refuse_register(register, "agent_flow")
    return partial(AgentFlow, name=name) if fn is None else AgentFlow(fn, name)


@overload
def evaluator(fn: Callable[..., Any]) -> Evaluator: ...
@overload
def evaluator() -> Callable[[Callable[..., Any]], Evaluator]: ...
def evaluator(fn: Any = None, *, register: str | None = None) -> Any:
    """Decorator: a function of (task, episode) as an evaluator. It may be async, and may set rewards of trajectories.

    It returns an EvalOutput, a reward, whether the rollout is right, or both.
    """
    _refuse_register(register, "evaluator")
    return Evaluator if fn is None else Evaluator(fn)


def _refuse_register(name: str | None, argument: str) -> None:
    if name is not None:
        raise UserError(f"register={name!r} is not supported.", f"Pass the object to AgentTrainer({argument}=…).")
