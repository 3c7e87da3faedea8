"""The workflow `tools`: the policy calls tools until it replies without a call."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

from pydantic import Field, field_validator
from typing_extensions import override

from tinsmith.chat.strict_json import parse_json
from tinsmith.errors import ConfigError, Unsupported
from tinsmith.rl.policy.chat_session import AgentChatRequest
from tinsmith.rl.tools import ToolConfig
from tinsmith.rl.tools.base import OpenTools, ToolOptions, ToolResult
from tinsmith.rl.types import Message, Rollout, Task, Termination
from tinsmith.rl.workflows.base import IndependentRollouts, Workflow, WorkflowContext, WorkflowOptions, WorkflowPolicy
from tinsmith.rl.workflows.single_turn import with_system_message


class ToolsConfig(WorkflowOptions):
    """The policy calls tools, whose results it reads, until it replies without a call; the rewards of the run score
    that reply. A call that fails is a result that says so; `workflow/tool_calls` and `workflow/tool_errors` count
    them."""

    type: Literal["tools"] = "tools"
    tools: tuple[ToolConfig, ...] = Field(min_length=1)
    """The tools: `{type: python}`, and `{type: mcp}` for all tools of an MCP server."""
    system: str = ""
    """System message for tasks that have none."""
    max_turns: int = Field(default=10, ge=1)
    """Maximum number of replies of a rollout."""

    @field_validator("tools")
    @classmethod
    def _check_names(cls, tools: tuple[ToolConfig, ...]) -> tuple[ToolConfig, ...]:
        names = Counter(tool.name for tool in tools if tool.type == "python")
        if names and max(names.values()) > 1:
            raise ValueError(f"two tools have the name {max(names, key=names.__getitem__)!r}; set another name")
        return tools

    @property
    @override
    def provides_states(self) -> bool:
        return False

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return IndependentRollouts(_ToolUse(self, context).rollout, context)


class _ToolUse:
    """The workflow in a run, with the tools that its rollouts share."""

    def __init__(self, config: ToolsConfig, context: WorkflowContext) -> None:
        self._config, self._context = config, context
        self._service_name = f"tools/{secrets.token_hex(8)}"
        self._shared: list[OpenTools] = []

    async def rollout(self, task: Task, policy: WorkflowPolicy, seed: int) -> Rollout:
        await self._context.agent_endpoint.serve(self._service_name, self._open_shared)
        async with AsyncExitStack() as stack:
            own = [await stack.enter_async_context(each.open(self._pool)) for each in self._options(per_rollout=True)]
            tools = _by_name([*self._shared, *own])
            definitions = [each for opened in (*self._shared, *own) for each in opened.definitions]
            return await self._play(task, policy, tools, definitions)

    async def _play(
        self,
        task: Task,
        policy: WorkflowPolicy,
        tools: Mapping[str, OpenTools],
        definitions: Sequence[Mapping[str, Any]],
    ) -> Rollout:
        messages = [_message(each) for each in with_system_message(task, self._config.system)]
        results: list[ToolResult] = []
        ending: Termination = "max_turns"
        async with policy.session() as session:
            for _ in range(self._config.max_turns):
                request = AgentChatRequest.model_validate({"messages": messages, "tools": definitions})
                ((turn, reply),) = await session.replies(request)
                calls = reply.get("tool_calls", ())
                if not calls or turn.stop == "length":
                    ending = "done"
                    break
                answers = await asyncio.gather(*(_call(tools, each["function"]) for each in calls))
                results += answers
                messages += [reply, *(_result(call, answer) for call, answer in zip(calls, answers, strict=True))]
        failed = sum(result.is_error for result in results)
        metrics = {"tool_calls": float(len(results)), "tool_errors": float(failed)}
        return policy.rollout(termination=ending, metrics=metrics)

    @asynccontextmanager
    async def _open_shared(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            options = self._options(per_rollout=False)
            self._shared = [await stack.enter_async_context(each.open(self._pool)) for each in options]
            yield

    def _options(self, *, per_rollout: bool) -> list[ToolOptions]:
        return [each for each in self._config.tools if (each.type == "mcp" and each.per_rollout) == per_rollout]

    @property
    def _pool(self) -> Any:
        return self._context.rewards.pool


def _by_name(opened: Sequence[OpenTools]) -> dict[str, OpenTools]:
    """The tools by name. Raises ConfigError if two have the same name."""
    tools: dict[str, OpenTools] = {}
    for each in opened:
        for name in (str(entry["function"]["name"]) for entry in each.definitions):
            if name in tools:
                raise ConfigError(f"tools: two tools have the name {name!r}.", "Set a prefix for one of the servers.")
            tools[name] = each
    return tools


async def _call(tools: Mapping[str, OpenTools], function: Mapping[str, Any]) -> ToolResult:
    name = str(function["name"])
    if name not in tools:
        return ToolResult(text=f"Error: there is no tool {name!r}. Tools: {', '.join(tools)}.", is_error=True)
    return await tools[name].call(name, parse_json(function["arguments"]))


def _result(call: Mapping[str, Any], result: ToolResult) -> dict[str, Any]:
    name = call["function"]["name"]
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result.text}


def _message(message: Message) -> dict[str, Any]:
    if message.images:
        raise Unsupported("The workflow tools takes no images.", "Remove `images` from the tasks, or use an agent.")
    return {"role": message.role, "content": message.content, **message.more}
