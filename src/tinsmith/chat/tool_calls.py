"""Parse tool calls from generated text, in the format that the model's chat template uses.

tagged    `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen), or `<function=…>` inside (Qwen Coder)
bare      the whole reply is `{"name": …, "parameters": {…}}` (Llama 3)
mistral   `[TOOL_CALLS]` and a list

Text that does not parse as a call is returned as text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinsmith.errors import Unsupported

TAG, END_TAG = "<tool_call>", "</tool_call>"
MISTRAL = "[TOOL_CALLS]"
PYTHON = "<|python_tag|>"
CALL_ID_LENGTH = 9
"""Letters and digits of a tool call's id: Mistral's templates accept no other length."""
ToolCallFormat = Literal["tagged", "bare", "mistral"]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the API returns it: `arguments` is JSON text."""

    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """The call as an entry of a response's `tool_calls`, with a new id."""
        call_id = secrets.token_hex(CALL_ID_LENGTH)[:CALL_ID_LENGTH]
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def tool_call_format(
    template: str, name: str, alternative: str = "serve a model trained to use them"
) -> ToolCallFormat:
    """The tool-call format of the model `name` with this chat template.

    Raises Unsupported if the template has no tools or an unknown format; `alternative` completes the error's hint.
    """
    if not re.search(r"\btools\b", template):
        raise Unsupported(f"The chat template of {name} does not support tools.", f"Remove tools, or {alternative}.")
    if TAG in template:
        return "tagged"
    if MISTRAL in template:
        return "mistral"
    if PYTHON in template or ('"name"' in template and '"parameters"' in template):
        return "bare"
    raise Unsupported(
        f"The chat template of {name} uses an unknown tool-call format.",
        "Remove tools; the formats of Hermes, Qwen, Llama 3 and Mistral are supported.",
    )


def marker_texts(form: ToolCallFormat | None) -> tuple[str, ...]:
    """Texts that delimit calls and so must be decoded, even where the tokenizer has them as special tokens."""
    return {"tagged": (TAG, END_TAG), "bare": (PYTHON,), "mistral": (MISTRAL, "[ARGS]"), None: ()}[form]


@dataclass(slots=True)
class ToolCallParser:
    """Incremental parser of one reply: returns text once it cannot be part of a call, and calls once complete."""

    form: ToolCallFormat
    tools: Sequence[Mapping[str, Any]] = ()
    parsed: int = 0
    """Calls returned up to now."""
    _held: str = ""
    _has_text: bool = field(default=False)
    """Text was returned: from then on a bare `{` is text."""

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add `text`; returns (text, calls) that are complete."""
        self._held += text
        return self._tagged() if self.form == "tagged" else (self._leading(), [])

    def end(self) -> tuple[str, list[ToolCall]]:
        """End of the reply: the remaining (text, calls)."""
        held, self._held = self._held, ""
        if self.form == "tagged":
            body, calls = held.strip().removeprefix(TAG), []
            if body != held.strip() and (call := _body(body.strip(), self.tools)):
                calls = [call]
        else:
            calls = _whole(held, self.form)
        self.parsed += len(calls)
        return ("", calls) if calls or (self.parsed and not held.strip()) else (held, [])

    def _tagged(self) -> tuple[str, list[ToolCall]]:
        out, calls = "", []
        while True:
            before, tag, rest = self._held.partition(TAG)
            if not tag:
                size = partial_match(self._held, (TAG,))
                if not self._held[: len(self._held) - size].strip() and not self._has_text:
                    return out, calls  # whitespace before a call, or between two, is dropped
                cut = len(self._held) - size
                out, self._held = out + self._held[:cut], self._held[cut:]
                self._has_text = self._has_text or bool(out)
                return out, calls
            if before.strip() or self._has_text:
                out, self._held = out + before, tag + rest
                self._has_text = True
            body, closed, rest = rest.partition(END_TAG)
            if not closed:
                return out, calls
            call = _body(body.strip(), self.tools)
            if call is None:
                out += TAG + body + END_TAG
            else:
                calls.append(call)
                self.parsed += 1
            self._held, self._has_text = rest, call is None

    def _leading(self) -> str:
        """Text before the marker, in formats whose calls end the reply."""
        mark = MISTRAL if self.form == "mistral" else PYTHON
        if self.form == "bare" and not self._has_text and (not self._held.strip() or self._held.lstrip()[0] == "{"):
            return ""
        at = self._held.find(mark)
        cut = at if at >= 0 else len(self._held) - partial_match(self._held, (mark,))
        if not self._has_text and not self._held[:cut].strip():
            return ""
        out, self._held = self._held[:cut], self._held[cut:]
        self._has_text = self._has_text or bool(out)
        return out


def partial_match(text: str, patterns: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `patterns`."""
    longest = max((len(pattern) for pattern in patterns), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(len(pattern) > size and pattern.startswith(text[-size:]) for pattern in patterns):
            return size
    return 0


def _body(body: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall | None:
    if (function := _FUNCTION.fullmatch(body)) is not None:
        types = _types(function[1], tools)
        values = {key: _value(text, types.get(key)) for key, text in _PARAMETER.findall(function[2])}
        return ToolCall(function[1], json.dumps(values, ensure_ascii=False))
    try:
        return _call(json.loads(body))
    except ValueError:
        return None


def _whole(text: str, form: ToolCallFormat) -> list[ToolCall]:
    """The calls of a text that holds nothing else; empty if it holds anything else."""
    rest = text.strip().removeprefix(MISTRAL if form == "mistral" else PYTHON).strip()
    calls: list[ToolCall | None] = []
    while rest:
        named = _NAMED.match(rest) if form == "mistral" else None
        try:
            value, end = json.JSONDecoder().raw_decode(rest, named.end() if named else 0)
        except ValueError:
            return []
        if named:
            value = {"name": named[1], "arguments": value}
        calls += [_call(entry) for entry in (value if isinstance(value, list) else [value])]
        rest = rest[end:].lstrip(" \n\t;").removeprefix(MISTRAL)
    return [call for call in calls if call] if all(calls) else []


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(
        value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )


def _types(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Declared JSON types of a tool's parameters by name."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            schema = function.get("parameters")
            declared = schema.get("properties") if isinstance(schema, dict) else None
            properties = declared.items() if isinstance(declared, dict) else ()
            return {key: schema.get("type") for key, schema in properties if isinstance(schema, dict)}
    return {}


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
