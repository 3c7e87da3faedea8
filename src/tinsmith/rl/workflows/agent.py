"""Agents: user code that samples the policy through an OpenAI client."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Literal

from typing_extensions import override

from tinsmith.rl.plugins import check_signature, import_object, path_text
from tinsmith.rl.rewards.base import RewardValue
from tinsmith.rl.types import Task
from tinsmith.rl.workflows.base import WorkflowPolicy
from tinsmith.rl.workflows.user_code import UserWorkflow

AGENT_ARGUMENTS = ("task", "client", "model")


class AgentConfig(UserWorkflow):
    """A custom agent: an async function of (task, client, model) that is called once per rollout.

    `client` is an openai.AsyncOpenAI that samples the policy, so agent frameworks work as they are. The function may
    return a reward, which is added to those of the run.
    """

    type: Literal["agent"] = "agent"

    @override
    def check_code(self) -> None:
        if find_spec("openai") is None:
            raise ValueError("agents need the package openai: pip install 'tinsmith[agents]'")
        function, path = import_object(self.path), path_text(self.path)
        if not inspect.iscoroutinefunction(function):
            raise ValueError(f"{path} is not an async function; define it with async def")
        check_signature(function, path, AGENT_ARGUMENTS, self.args)

    @property
    @override
    def provides_states(self) -> bool:
        return False  # OpenAI's API has no field for them

    @override
    async def rollout(self, task: Task, policy: WorkflowPolicy, seed: int) -> RewardValue | None:
        from openai import AsyncOpenAI

        async with policy.session() as session:
            client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=None)
            async with client:
                return await import_object(self.path)(task, client, session.model, **self.args)
