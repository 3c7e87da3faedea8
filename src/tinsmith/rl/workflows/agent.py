"""Agents: user code that samples the policy through an OpenAI client."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from tinsmith.rl.guards.user_code import describe, is_fault
from tinsmith.rl.plugins import check_signature, import_object
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Rollout, Task
from tinsmith.rl.workflows.base import IndependentRollouts, Workflow, WorkflowContext, WorkflowOptions, score_turns

AGENT_ARGUMENTS = ("task", "client", "model")


class AgentConfig(WorkflowOptions):
    """A custom agent: an async function of (task, client, model) that is called once per rollout.

    `client` is an openai.AsyncOpenAI that samples the policy, so agent frameworks work as they are. The function may
    return a reward, which is added to those of the run.
    """

    type: Literal["agent"] = "agent"
    path: str
    """Import path, module:function: `my_package.agents:search`, or `search:agent` for search.py in `plugins`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _check_path(self) -> AgentConfig:
        if find_spec("openai") is None:
            raise ValueError("agents need the package openai: pip install 'tinsmith[agents]'")
        function = import_object(self.path)
        if not inspect.iscoroutinefunction(function):
            raise ValueError(f"{self.path} is not an async function; define it with async def")
        check_signature(function, self.path, AGENT_ARGUMENTS, self.args)
        return self

    @property
    @override
    def provides_rewards(self) -> bool:
        return True

    @property
    @override
    def provides_states(self) -> bool:
        return False  # OpenAI's API has no field for them

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return AgentWorkflow(self, context)


class AgentWorkflow(IndependentRollouts):
    """Calls the agent once per rollout, concurrently, each with its own session at the agent endpoint."""

    def __init__(self, config: AgentConfig, context: WorkflowContext) -> None:
        self._function, self._args, self._context = import_object(config.path), config.args, context

    @override
    async def rollout(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        from openai import AsyncOpenAI

        async with self._context.agent_endpoint.session(policy, self._context.sampling, seed) as session:
            client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=None)
            try:
                async with client:
                    reward = await self._function(task, client, session.model, **self._args)
            except BaseException as error:
                if not is_fault(error):
                    raise
                return Rollout.single(session.turns).failed(describe(error))
            if not session.turns:
                return Rollout(error="the agent sampled no reply")
            return await score_turns(task, session.turns, self._context.rewards, policy, reward)
