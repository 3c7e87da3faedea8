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
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any, overload

from typing_extensions import override

from tinsmith.errors import UserError
from tinsmith.rl.workflows.base import AdaptedWorkflow, WorkflowOptions
from tinsmith.rllm.records import Episode, Trajectory


@dataclass
class Task:
    """A row of a dataset, as a flow and an evaluator receive it. `task[key]` is a field of the row."""

    id: str
    instruction: str = ""
    """The question, prompt or problem of the row."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row."""

    @property
    def data(self) -> dict[str, Any]:
        """The row."""
        return self.metadata

    def __getitem__(self, key: str) -> Any:
        return self.metadata[key]

    def __contains__(self, key: object) -> bool:
        return key in self.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """A field of the row, or `default`."""
        return self.metadata.get(key, default)


@dataclass
class AgentConfig:
    """Where a flow samples the policy: the settings of an OpenAI client, for one rollout. Any API key is valid."""

    base_url: str
    model: str
    session_uid: str
    is_validation: bool = False
    sampling_params: dict[str, Any] = field(default_factory=dict)
    """The run's sampling settings. Requests without settings of their own use them."""
    metadata: dict[str, Any] = field(default_factory=dict)
    api_key: str = "EMPTY"


@dataclass
class Signal:
    """A number that an evaluator measures; it becomes a metric."""

    name: str
    value: float
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvalOutput:
    """The result of an evaluator. `reward` is that of trajectories that it gives none."""

    reward: float
    is_correct: bool
    signals: list[Signal] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


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
        """The episode of a task, where no event loop runs."""
        return asyncio.run(self.arun(task, config))

    def __call__(self, task: Task, config: AgentConfig) -> Any:
        """Call the function itself."""
        return self._function(task, config)

    @override
    def workflow_options(self, args: Mapping[str, Any]) -> WorkflowOptions:  # type: ignore[override]  # of the object
        from tinsmith.rllm.flow_training import FlowOptions  # which imports this module

        if unknown := sorted(args.keys() - {"evaluator"}):
            raise ValueError(f"a flow has no argument {unknown[0]}; its arguments are evaluator")
        return FlowOptions(flow=self, evaluator=args.get("evaluator"))


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
        """The result for an episode, where no event loop runs."""
        return asyncio.run(self.aevaluate(task, episode))

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


def episode_of(result: Any, task: Task, name: str) -> Episode:
    """The episode of what a flow returned. Raises UserError for a type that is none of those of `rollout`."""
    match result:
        case Episode():
            episode = result
        case None:
            episode = Episode(trajectories=[Trajectory(name=name)])
        case Trajectory():
            episode = Episode(trajectories=[result])
        case str():
            episode = Episode(trajectories=[Trajectory(name=name, output=result)], artifacts={"answer": result})
        case Mapping():
            episode = Episode(trajectories=[Trajectory(name=name)], artifacts=dict(result))
        case list() if result and all(isinstance(each, Trajectory) for each in result):
            episode = Episode(trajectories=result)
        case _:
            raise UserError(
                f"The flow returned a {type(result).__name__}.", "Return an Episode, a Trajectory, text, or nothing."
            )
    episode.task = task.metadata if episode.task is None else episode.task
    if "answer" not in episode.artifacts and episode.trajectories and episode.trajectories[-1].output is not None:
        episode.artifacts["answer"] = str(episode.trajectories[-1].output)
    return episode


def output_of(result: Any) -> EvalOutput:
    """The result of an evaluator as an EvalOutput. Raises UserError for another type."""
    match result:
        case EvalOutput():
            return result
        case bool():
            return EvalOutput(reward=float(result), is_correct=result)
        case (reward, right):
            return EvalOutput(reward=float(reward), is_correct=bool(right))
        case None | str():
            pass
        case _:
            try:
                return EvalOutput(reward=float(result), is_correct=float(result) > 0)
            except (TypeError, ValueError):
                pass
    raise UserError(
        f"The evaluator returned a {type(result).__name__}.", "Return an EvalOutput, a number, or whether it is right."
    )
