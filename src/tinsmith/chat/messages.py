"""Convert messages and tools of the OpenAI API to the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.errors import BadRequest, Unsupported

_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_tools(tools: Sequence[Mapping[str, Any]], choice: Any) -> list[dict[str, Any]]:
    """Tools to render into the prompt; none for tool_choice "none". Raises BadRequest or Unsupported."""
    for number, tool in enumerate(tools):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{number}] is not a function with a name.", "Send {type, function}.")
    if choice not in ("auto", "none"):
        raise Unsupported("tool_choice must be 'auto' or 'none'.", "Request the tool call in the prompt.")
    return [] if choice == "none" else [dict(tool) for tool in tools]


def parse_messages(messages: Sequence[Mapping[str, Any]], *, developer_role: bool) -> list[dict[str, Any]]:
    """Messages for a chat template; without `developer_role`, developer messages become system messages.

    Tool results get the name of the called function, which the API omits and some templates read. Raises BadRequest or
    Unsupported.
    """
    parsed = [_message(number, message, developer_role) for number, message in enumerate(messages)]
    names = {
        call.get("id"): call["function"].get("name") for message in parsed for call in message.get("tool_calls", ())
    }
    for message in parsed:
        name = names.get(message.get("tool_call_id"))
        if message["role"] == "tool" and name is not None:
            message.setdefault("name", name)
    return parsed


def _message(number: int, message: Mapping[str, Any], developer_role: bool) -> dict[str, Any]:
    where, role = f"messages[{number}]", message.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{where}.role is {role!r}.", f"Send one of {', '.join(_ROLES)}.")
    parsed = {
        key: value for key, value in message.items() if value is not None and key not in ("content", "tool_calls")
    }
    parsed["role"] = "system" if role == "developer" and not developer_role else role
    parsed["content"] = _text(f"{where}.content", message.get("content"))
    if calls := message.get("tool_calls"):
        parsed["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return parsed


def _text(where: str, content: Any) -> str:
    """Message content as text; the parts of a list are joined by newlines."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where} is neither text nor a list of parts.", "Send a string.")
    lines = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise Unsupported(f"{where} holds a part of type {kind}.", "Send text parts only.")
        lines.append(part[kind])
    return "\n".join(lines)


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: the API sends JSON text, templates read objects."""
    parsed = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise BadRequest(f"{where} holds an entry that is not a function call.", "Send {id, type, function}.")
        parsed.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return parsed


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments
