"""A tool call as the API returns it, and the JSON that it is read from.

Arguments are a JSON object that every client can read: finite numbers, whole characters, limited nesting. Of equal
keys, the last counts.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CALL_ID_LENGTH = 9
"""Letters and digits of a tool call's id: Mistral's templates accept no other length."""
MAX_DEPTH = 100
"""Nesting of the JSON of a call; deeper is text. Readers of JSON fail at different depths."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call: `arguments` is the text of a JSON object."""

    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """The call as an entry of a response's `tool_calls`, with a new id."""
        call_id = secrets.token_hex(CALL_ID_LENGTH)[:CALL_ID_LENGTH]
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for NaN, 1e999, half a surrogate pair and deep nesting."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_reject)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    json_text(value)
    return value


def json_text(value: Any) -> str:
    """JSON text of a value. Raises ValueError for what is not JSON."""
    if _depth(value) > MAX_DEPTH:
        raise ValueError("nested too deeply")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def call_of(name: Any, arguments: Any) -> ToolCall | None:
    """The call of a tool; None unless the arguments are a JSON object, or a string that holds one."""
    if not isinstance(name, str) or not name:
        return None
    try:
        arguments = read_json(arguments) if isinstance(arguments, str) else arguments
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


def _depth(value: Any) -> int:
    """Levels of nesting, counted up to one more than MAX_DEPTH."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [part for item in inner for part in (item.values() if isinstance(item, dict) else item)]
        depth += bool(inner)
        if not inner:
            break
    return depth


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def _reject(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
