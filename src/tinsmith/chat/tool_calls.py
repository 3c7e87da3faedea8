"""Tool calls in what a model wrote: which form its chat template teaches, and how each form is read.

Tagged: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen), or `<function=…>` inside (Qwen Coder).
Bare: the whole answer is `{"name": …, "parameters": {…}}` (Llama 3). Mistral: `[TOOL_CALLS]` and a list.
What cannot be read stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinsmith.errors import Unsupported

TAG, END_TAG = "<tool_call>", "</tool_call>"
MISTRAL = "[TOOL_CALLS]"
PYTHON = "<|python_tag|>"
Form = Literal["tagged", "bare", "mistral"]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the API gives it: `arguments` is JSON."""

    name: str
    arguments: str


def form_of(template: str, name: str, otherwise: str = "serve a model trained to use them") -> Form:
    """How the model of this chat template calls tools. Raises Unsupported; `otherwise` is a cure beside leaving out."""
    if not re.search(r"\btools\b", template):
        raise Unsupported(f"The chat template of {name} takes no tools.", f"Leave tools out, or {otherwise}.")
    if TAG in template:
        return "tagged"
    if MISTRAL in template:
        return "mistral"
    if PYTHON in template or ('"name"' in template and '"parameters"' in template):
        return "bare"
    raise Unsupported(
        f"The chat template of {name} has tool calls in a form that is not read here.",
        "Leave tools out; forms of Hermes, Qwen, Llama 3 and Mistral are read.",
    )


def marks_of(form: Form | None) -> tuple[str, ...]:
    """Texts that must be seen to find the calls, though the tokenizer may count them as marks."""
    return {"tagged": (TAG, END_TAG), "bare": (PYTHON,), "mistral": (MISTRAL, "[ARGS]"), None: ()}[form]


@dataclass(slots=True)
class Reading:
    """An answer's text as it comes in: what is certainly text goes out at once, a call when it is complete."""

    form: Form
    tools: Sequence[Mapping[str, Any]] = ()
    found: int = 0
    _held: str = ""
    _spoke: bool = field(default=False)
    """Text went out: from then on a bare `{` is text."""

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """(text, calls) that are certain now."""
        self._held += text
        return self._tagged() if self.form == "tagged" else (self._leading(), [])

    def end(self) -> tuple[str, list[Call]]:
        """What was held back, read as a call if it is one."""
        held, self._held = self._held, ""
        if self.form == "tagged":
            body, calls = held.strip().removeprefix(TAG), []
            if body != held.strip() and (call := _body(body.strip(), self.tools)):
                calls = [call]
        else:
            calls = _whole(held, self.form)
        self.found += len(calls)
        return ("", calls) if calls or (self.found and not held.strip()) else (held, [])

    def _tagged(self) -> tuple[str, list[Call]]:
        said, calls = "", []
        while True:
            before, tag, rest = self._held.partition(TAG)
            if not tag:
                keep = held_back(self._held, (TAG,))
                if not self._held[: len(self._held) - keep].strip() and not self._spoke:
                    return said, calls  # blanks before a call, or between two, are no text
                cut = len(self._held) - keep
                said, self._held = said + self._held[:cut], self._held[cut:]
                self._spoke = self._spoke or bool(said)
                return said, calls
            if before.strip() or self._spoke:
                said, self._held = said + before, tag + rest
                self._spoke = True
            body, closed, rest = rest.partition(END_TAG)
            if not closed:
                return said, calls
            call = _body(body.strip(), self.tools)
            if call is None:
                said += TAG + body + END_TAG
            else:
                calls.append(call)
                self.found += 1
            self._held, self._spoke = rest, call is None

    def _leading(self) -> str:
        """Of forms whose calls are all that follows: everything before the mark."""
        mark = MISTRAL if self.form == "mistral" else PYTHON
        if self.form == "bare" and not self._spoke and (not self._held.strip() or self._held.lstrip()[0] == "{"):
            return ""
        at = self._held.find(mark)
        cut = at if at >= 0 else len(self._held) - held_back(self._held, (mark,))
        if not self._spoke and not self._held[:cut].strip():
            return ""
        said, self._held = self._held[:cut], self._held[cut:]
        self._spoke = self._spoke or bool(said)
        return said


def held_back(text: str, wanted: Sequence[str]) -> int:
    """Characters at the end of `text` with which one of the wanted texts may begin."""
    longest = max((len(one) for one in wanted), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(len(one) > size and one.startswith(text[-size:]) for one in wanted):
            return size
    return 0


def _body(body: str, tools: Sequence[Mapping[str, Any]]) -> Call | None:
    if (function := _FUNCTION.fullmatch(body)) is not None:
        types = _types(function[1], tools)
        values = {key: _value(text, types.get(key)) for key, text in _PARAMETER.findall(function[2])}
        return Call(function[1], json.dumps(values, ensure_ascii=False))
    try:
        return _call(json.loads(body))
    except ValueError:
        return None


def _whole(text: str, form: Form) -> list[Call]:
    """All calls of a text that consists of nothing else; none if there is anything else in it."""
    rest = text.strip().removeprefix(MISTRAL if form == "mistral" else PYTHON).strip()
    calls: list[Call | None] = []
    while rest:
        named = _NAMED.match(rest) if form == "mistral" else None
        try:
            value, end = json.JSONDecoder().raw_decode(rest, named.end() if named else 0)
        except ValueError:
            return []
        if named:
            value = {"name": named[1], "arguments": value}
        calls += [_call(one) for one in (value if isinstance(value, list) else [value])]
        rest = rest[end:].lstrip(" \n\t;").removeprefix(MISTRAL)
    return [call for call in calls if call] if all(calls) else []


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get("arguments", value.get("parameters", {}))
    return Call(value["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))


def _types(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON types of a tool's parameters, as far as they are declared."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            schema = function.get("parameters")
            declared = schema.get("properties") if isinstance(schema, dict) else None
            named = declared.items() if isinstance(declared, dict) else ()
            return {key: one.get("type") for key, one in named if isinstance(one, dict)}
    return {}


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
