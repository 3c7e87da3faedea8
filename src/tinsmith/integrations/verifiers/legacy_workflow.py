"""Rollouts of an environment of verifiers 0.1.9 to 0.3.

The rubric of these versions counts a reward function that raises as 0. Here such a rollout has failed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from typing_extensions import override

from tinsmith.integrations.verifiers.rollouts import NO_LOGPROB, has_logprobs
from tinsmith.rl.guards.user_code import contained, describe
from tinsmith.rl.plugins import await_if_needed
from tinsmith.rl.policy.agent_endpoint import AgentSession
from tinsmith.rl.policy.chat_session import MODEL
from tinsmith.rl.policy.sampling import Snapshot, request_seed
from tinsmith.rl.types import Rollout, Task, Termination, Trajectory
from tinsmith.rl.workflows.base import Workflow, WorkflowContext

ROW = "verifiers_legacy"
"""Key of a row's columns in Task.extra."""

_TERMINATIONS: Mapping[str, Termination] = {"max_turns_reached": "max_turns", "prompt_too_long": "max_prompt"}


class LegacyWorkflow(Workflow):
    """Runs the environment's own rollout for each member of a group, and its rubric on the group."""

    def __init__(self, environment: Any, context: WorkflowContext) -> None:
        self._environment, self._context = environment, context
        self._failures: ContextVar[list[str]] = ContextVar("failures of reward functions")
        self._rubrics = tuple(_rubrics(environment.rubric))
        for rubric in self._rubrics:
            rubric.funcs = [_noting_failure(function, self._failures) for function in rubric.funcs]

    @override
    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        async with AsyncExitStack() as stack:
            sessions = []
            for index in range(count):
                session = self._context.agent_endpoint.session(
                    policy, self._context.sampling, request_seed(seed, index), open_url=True
                )
                sessions.append(await stack.enter_async_context(session))
            states = await asyncio.gather(*(self._state(task, session) for session in sessions))
            scored = await self._score([state for state in states if not isinstance(state, str)])
        errors = iter(scored)
        rollouts = []
        for state, session in zip(states, sessions, strict=True):
            error = state if isinstance(state, str) else next(errors)
            rollouts.append(self._rollout({} if isinstance(state, str) else state, session, error))
        return tuple(rollouts)

    async def _state(self, task: Task, session: AgentSession) -> Any:
        """The state after the rollout; its error, if it failed."""
        from openai import AsyncOpenAI

        client: Any = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=None)

        async def rolled_out() -> Any:
            async with client:
                return await self._environment.rollout(deepcopy(task.extra[ROW]), _adapted(client), MODEL, {})

        state = await contained(rolled_out(), describe)
        if isinstance(state, str):
            return state
        if error := state.get("error"):
            return f"{type(error).__name__}: {error.__cause__ or error}"
        return state if session.turns else "the environment sampled no reply"

    async def _score(self, states: list[Any]) -> list[str]:
        """Give every state its reward. Returns the error of each; empty if it was scored."""
        if not states:
            return []
        if any(rubric._is_group_func(function) for rubric in self._rubrics for function in rubric.funcs):
            error = await self._scored(self._environment.rubric.score_group, states)
            return [error] * len(states)
        score = self._environment.rubric.score_rollout
        return list(await asyncio.gather(*(self._scored(score, state) for state in states)))

    async def _scored(self, score: Callable[..., Any], scored: Any) -> str:
        failures: list[str] = []
        token = self._failures.set(failures)
        # Versions before 0.2 take a semaphore for the reward functions.
        more = {"score_sem": nullcontext()} if "score_sem" in inspect.signature(score).parameters else {}
        try:
            await contained(score(scored, **more), lambda error: failures.append(describe(error)))
        finally:
            self._failures.reset(token)
        return f"reward: {failures[0]}" if failures else ""

    def _rollout(self, state: Mapping[str, Any], session: AgentSession, error: str) -> Rollout:
        rollout = Rollout.single(session.turns)
        if error or not has_logprobs(session.turns):
            return rollout.failed(error or NO_LOGPROB)
        values = {name: float(value) for name, value in (state["metrics"] or {}).items() if value is not None}
        rewards = {
            function.__name__
            for rubric in self._rubrics
            for function, weight in zip(rubric.funcs, rubric.weights, strict=False)
            if weight
        }
        return Rollout(
            trajectories=(Trajectory(turns=session.turns, reward=float(state["reward"])),),
            reward_parts={name: value for name, value in values.items() if name in rewards},
            metrics={name: value for name, value in values.items() if name not in rewards},
            termination=_TERMINATIONS.get(str(state.get("stop_condition")), "done"),
        )


def _adapted(client: Any) -> Any:
    """The client as the version takes it: 0.1 takes OpenAI's own, later ones a class around it."""
    if find_spec("verifiers.clients") is None:
        return client
    return import_module("verifiers.clients").OpenAIChatCompletionsClient(client)


def _rubrics(rubric: Any) -> Iterator[Any]:
    """The rubric, or those of a group of rubrics."""
    parts = vars(rubric).get("rubrics")
    if parts is None:
        yield rubric
    for part in parts or ():
        yield from _rubrics(part)


def _noting_failure(function: Callable[..., Any], failures: ContextVar[list[str]]) -> Callable[..., Any]:
    """The reward function; if it raises, the error is also added to the list of the rollout that is scored."""

    @wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return await await_if_needed(function(*args, **kwargs))
        except Exception as error:
            failures.get([]).append(f"{call.__name__}: {describe(error)}")
            raise

    return call
