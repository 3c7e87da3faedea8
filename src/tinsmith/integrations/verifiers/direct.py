"""The harness `direct`: verifiers' chat loop within this process.

It calls the model until a reply has no tool calls, as verifiers' harness `null` does in a subprocess. Every call goes
through verifiers' interception server, so limits, stops and the record of a trace are the same.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

ID = "tinsmith_direct"
"""The name by which verifiers imports this module as a harness."""

__all__ = ["DirectHarness"]

_TOO_LONG = "context_length_exceeded"


class DirectConfig(HarnessConfig):
    """Settings of the harness; it has none of its own."""


class DirectHarness(Harness[DirectConfig]):
    """A chat loop with the tools of the task. It keeps no state."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Run the loop; the result of a stopped rollout says why."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        headers = {"Authorization": f"Bearer {secret}"}
        async with AsyncExitStack() as stack:
            # The server is on localhost, without TLS: loading certificates would take most of a short rollout's time.
            http = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=None, verify=False))
            schemas, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            tools = _Tools(http, dispatch, connections, tool_interception_url)
            request = {"model": ctx.model, **({"tools": schemas} if schemas else {})}
            return await _converse(http, f"{endpoint}/chat/completions", request, messages, tools)


async def _converse(
    http: httpx.AsyncClient, url: str, request: dict[str, Any], messages: list[dict[str, Any]], tools: _Tools
) -> ProgramResult:
    replies = 0
    while True:
        response = await http.post(url, json={**request, "messages": messages})
        if response.is_error:
            ended = replies and _TOO_LONG in response.text  # what was said so far is the rollout
            return ProgramResult(0 if ended else 1, "", "" if ended else response.text)
        message = response.json()["choices"][0]["message"]
        messages.append({key: value for key, value in message.items() if value is not None})
        replies += 1
        if not message.get("tool_calls"):
            return ProgramResult(0, message.get("content") or "", "")
        for call in message["tool_calls"]:
            messages.append(await tools.result(call))


class _Tools:
    """The tool servers of a rollout."""

    def __init__(self, http: httpx.AsyncClient, dispatch: Any, connections: Any, gate: str | None) -> None:
        """`gate`: URL that allows or denies each call, if the task has a say in them."""
        self._http, self._dispatch, self._connections, self._gate = http, dispatch, connections, gate

    async def result(self, call: dict[str, Any]) -> dict[str, Any]:
        """The tool message that answers a call."""
        name = call["function"]["name"]
        answer = {"role": "tool", "tool_call_id": call["id"], "name": name}
        arguments: Any = call["function"]["arguments"] or "{}"
        try:
            arguments = json.loads(arguments)
            fault = "" if isinstance(arguments, dict) else "the arguments are not an object"
        except ValueError as error:
            fault = f"the arguments are not JSON: {error}"
        if self._gate is not None:
            body = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
            response = await self._http.post(self._gate, json=body)
            decision = response.raise_for_status().json()
            if decision["action"] == "stop":
                raise RuntimeError(decision["reason"])
            if decision["action"] == "deny":
                return decision["message"]
        if not fault and name not in self._dispatch:
            fault = f"there is no tool {name!r}"
        if fault:
            return {**answer, "content": f"error: {fault}"}
        return {**answer, "content": await call_mcp(self._connections, self._dispatch, name, arguments)}


sys.modules.setdefault(ID, sys.modules[__name__])  # verifiers imports a harness by a name without dots
