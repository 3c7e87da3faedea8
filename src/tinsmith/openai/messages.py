"""Chat messages as OpenAI's dialect sends them -> as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.errors import BadRequest, Unsupported

_ROLES = ("system", "developer", "user", "assistant", "tool")


def plain_tools(given: Sequence[Mapping[str, Any]], choice: Any) -> list[dict[str, Any]]:
    """The tools that the model is told of. Raises BadRequest or Unsupported."""
    for number, tool in enumerate(given):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest(f"tools[{number}] is no function with a name.", "Send {type, function}.")
    if choice not in ("auto", "none"):
        raise Unsupported(
            "A tool_choice other than 'auto' and 'none' is not served here.", "Ask for the call in the prompt."
        )
    return [] if choice == "none" else [dict(tool) for tool in given]


def plain_messages(given: Sequence[Mapping[str, Any]], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Answers of tools get the name of what was called, which the API leaves out and some templates want."""
    made = [_message(number, one, knows_developer) for number, one in enumerate(given)]
    names = {call.get("id"): call["function"].get("name") for one in made for call in one.get("tool_calls", ())}
    for one in made:
        called = names.get(one.get("tool_call_id"))
        if one["role"] == "tool" and called is not None:
            one.setdefault("name", called)
    return made


def _message(number: int, message: Mapping[str, Any], knows_developer: bool) -> dict[str, Any]:
    where, role = f"messages[{number}]", message.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{where}.role is {role!r}.", f"One of {', '.join(_ROLES)}.")
    made = {key: value for key, value in message.items() if value is not None and key not in ("content", "tool_calls")}
    made["role"] = "system" if role == "developer" and not knows_developer else role
    made["content"] = _text(f"{where}.content", message.get("content"))
    if calls := message.get("tool_calls"):
        made["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return made


def _text(where: str, content: Any) -> str:
    """A text, or the texts of parts, a line each."""
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
            raise Unsupported(f"{where} holds a part of type {kind}.", "This server takes text only.")
        lines.append(part[kind])
    return "\n".join(lines)


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Templates want the arguments as an object, the API sends them as JSON text."""
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise BadRequest(f"{where} holds something that is no function call.", "Send {id, type, function}.")
        made.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return made


def _arguments(given: Any) -> Any:
    if not isinstance(given, str):
        return given if given is not None else {}
    try:
        return json.loads(given or "{}")
    except ValueError:
        return given
