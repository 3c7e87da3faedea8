"""A tool call as the API returns it, and the values that it is read from.

Arguments are an object of strict JSON, which every client can read. Of equal keys, the last counts.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith.chat.strict_json import json_text, parse_json

CALL_ID_LENGTH = 9
"""Letters and digits of a tool call's id: Mistral's templates accept no other length."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call: `arguments` is the text of a JSON object."""

    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """The call as an entry of a response's `tool_calls`, with a new id."""
        call_id = secrets.token_hex(CALL_ID_LENGTH)[:CALL_ID_LENGTH]
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def call_of(name: Any, arguments: Any) -> ToolCall | None:
    """The call of a tool; None unless the arguments are a JSON object, or a string that holds one."""
    if not isinstance(name, str) or not name:
        return None
    try:
        arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
        return ToolCall(name, json_text(arguments)) if isinstance(arguments, dict) else None
    except ValueError:
        return None


def call_in(value: Any, *, bare: bool = False) -> ToolCall | None:
    """The call in an object with `name` and `arguments` or `parameters`, which only a `bare` call may not leave out."""
    if not isinstance(value, Mapping):
        return None
    key = "arguments" if "arguments" in value else "parameters"
    if bare and key not in value:
        return None
    return call_of(value.get("name"), value.get(key, {}))
