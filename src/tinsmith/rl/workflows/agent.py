"""An agent of the user's own: it reaches the policy through the client of OpenAI's dialect that it is given."""

from __future__ import annotations

import asyncio
import inspect
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field, model_validator

from tinsmith.rl.plugins import check_signature, import_object
from tinsmith.rl.policy.base import Snapshot, request_seed
from tinsmith.rl.types import Rollout, Task
from tinsmith.rl.workflows.base import Workflow, WorkflowContext, WorkflowOptions, score_turns


class AgentConfig(WorkflowOptions):
    """An async function of (task, client, model), client an openai.AsyncOpenAI: tools, frameworks, whatever it uses."""

    type: Literal["agent"] = "agent"
    path: str
    """module:function, as my_package.agents:search or, of a file search.py in `plugins`, search:agent."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _can_be_used(self) -> AgentConfig:
        if find_spec("openai") is None:
            raise ValueError("agents need the package openai: pip install 'tinsmith[agents]'")
        function = import_object(self.path)
        if not inspect.iscoroutinefunction(function):
            raise ValueError(f"{self.path} is no async function; write async def")
        check_signature(function, self.path, 3, self.args)
        return self

    @property
    def provides_rewards(self) -> bool:
        """The function may return one."""
        return True

    @property
    def provides_states(self) -> bool:
        """OpenAI's dialect has no place for them."""
        return False

    def make(self, parts: WorkflowContext) -> Workflow:
        """The workflow."""
        return AgentWorkflow(self, parts)


class AgentWorkflow:
    """Rollouts of a task go side by side, each a call of the function with a line of its own."""

    def __init__(self, config: AgentConfig, parts: WorkflowContext) -> None:
        self._function, self._args, self._parts = import_object(config.path), config.args, parts

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        """`count` calls."""
        return tuple(await asyncio.gather(*(self._one(task, policy, request_seed(seed, at)) for at in range(count))))

    async def _one(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        from openai import AsyncOpenAI

        async with self._parts.agent_endpoint.session(policy, self._parts.sampling, seed) as line:
            client = AsyncOpenAI(base_url=line.base_url, api_key=line.api_key, max_retries=0, timeout=None)
            try:
                async with client:
                    own = await self._function(task, client, line.model, **self._args)
            except Exception as error:  # noqa: BLE001  it is the user's code, and one rollout's fault is not the group's
                return Rollout(turns=line.turns, error=f"{type(error).__name__}: {error}")
            if not line.turns:
                return Rollout(error="the agent sampled no reply")
            return await score_turns(task, line.turns, self._parts.rewards, policy, own)
