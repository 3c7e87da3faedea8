"""Grammars of calls: what follows a marker, in each format.

A grammar returns the calls that begin at a position and where they end, or None where the text there is no call. It is
a generator that yields while it waits for text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.chat.strict_json import MAX_DEPTH, parse_json
from tinsmith.chat.tool_calls.arguments import ToolCall, call_in, call_of
from tinsmith.chat.tool_calls.formats import (
    ARGS,
    CALL_ID,
    END_FUNCTION,
    END_PARAMETER,
    END_TAG,
    FUNCTION,
    PARAMETER,
    PYTHON,
    TAG,
)
from tinsmith.chat.tool_calls.reader import SPACE, Reader, Waiting
from tinsmith.chat.tool_calls.schemas import ParameterTypes

Calls = tuple[list[ToolCall], int]
"""(calls, position after them)."""

_NAME_END = re.compile(r"[<>\n]")
_NOT_IN_NAME = re.compile(r"[^\w.-]")
_AFTER_VALUE = (PARAMETER, END_FUNCTION, END_TAG)
_NESTED = "\n" + PARAMETER
_PARAMETER_TAG = re.compile(f"{_NESTED}|{END_PARAMETER}(?=[{SPACE}]*(?:{'|'.join(_AFTER_VALUE)}))")


class Grammar:
    """The grammars of one reply, by the marker before the calls."""

    def __init__(self, reader: Reader, tools: Sequence[Mapping[str, Any]]) -> None:
        self._reader = reader
        self._unclosed = -1
        """Where a parameter's value begins that has no end, if there is one."""
        self._tools: dict[str, ParameterTypes] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._tools[function["name"]] = ParameterTypes(function.get("parameters"))

    def calls(self, marker: str, at: int) -> Waiting[Calls | None]:
        """The calls that begin with `marker` at `at`."""
        after = at + len(marker)
        if marker == TAG:
            return (yield from self._tagged(after))
        if marker == FUNCTION:
            return (yield from self._untagged(at))
        if marker == PYTHON:
            return (yield from self.bare(after))
        return (yield from self._mistral(after))

    def bare(self, at: int) -> Waiting[Calls | None]:
        """Calls of declared tools as JSON objects, with `;` or space between them."""
        calls: list[ToolCall] = []
        end = at
        while True:
            at = yield from self._reader.skip(at, SPACE + (";" if calls else ""))
            if calls and (yield from self._reader.first_of(at, (PYTHON,))):
                at = yield from self._reader.skip(at + len(PYTHON))
            result = yield from self._json_calls(at, bare=True)
            if result is None or result[0][0].name not in self._tools:
                return (calls, end) if calls else None
            calls, end = [*calls, *result[0]], result[1]
            at = end

    def _tagged(self, at: int) -> Waiting[Calls | None]:
        at = yield from self._reader.skip(at)
        if (yield from self._reader.first_of(at, (FUNCTION,))):
            result = yield from self._functions(at)
        else:
            result = yield from self._json_calls(at)
        if result is None:
            return None
        at = yield from self._reader.skip(result[1])
        if (yield from self._reader.first_of(at, (END_TAG,))):
            return result[0], at + len(END_TAG)
        if self._reader.ended and END_TAG.startswith(self._reader.text[at:]):  # a stop or the limit took the end
            return result[0], len(self._reader.text)
        return None

    def _untagged(self, at: int) -> Waiting[Calls | None]:
        """Functions without the opening tag, which Qwen Coder leaves out at times: of declared tools only."""
        result = yield from self._functions(at)
        if result is None or any(call.name not in self._tools for call in result[0]):
            return None
        at = yield from self._reader.skip(result[1])
        closed = yield from self._reader.first_of(at, (END_TAG,))
        return result[0], at + len(closed) if closed else result[1]

    def _mistral(self, at: int) -> Waiting[Calls | None]:
        reader = self._reader
        at = yield from reader.skip(at)
        if (yield from reader.wait(at + 1)) in ("[", "{"):
            return (yield from self._json_calls(at, listed=True))
        name_end = yield from reader.search(_NOT_IN_NAME, at)
        if name_end is None:
            return None
        name = reader.text[at : name_end.start()]
        at = yield from reader.skip(name_end.start())
        if (yield from reader.first_of(at, (CALL_ID, ARGS))) == CALL_ID:
            id_end = yield from reader.search(_NOT_IN_NAME, at + len(CALL_ID))
            at = yield from reader.skip(id_end.start() if id_end else len(reader.text))
        if (yield from reader.first_of(at, (ARGS,))):
            at = yield from reader.skip(at + len(ARGS))
        end = yield from reader.json_end(at)
        call = call_of(name, reader.text[at:end]) if end > 0 else None
        return ([call], end) if call else None

    def _json_calls(self, at: int, *, bare: bool = False, listed: bool = False) -> Waiting[Calls | None]:
        """The call that is a JSON object or, if `listed`, the calls of a list of them."""
        end = yield from self._reader.json_end(at)
        if end < 0:
            return None
        try:
            value = parse_json(self._reader.text[at:end])
        except ValueError:
            return None
        entries = value if listed and isinstance(value, list) else [value]
        calls = [call for entry in entries if (call := call_in(entry, bare=bare))]
        return (calls, end) if calls and len(calls) == len(entries) else None

    def _functions(self, at: int) -> Waiting[Calls | None]:
        calls: list[ToolCall] = []
        end = at
        while (yield from self._reader.first_of(at, (FUNCTION,))):
            result = yield from self._function(at + len(FUNCTION))
            if result is None:
                return None
            call, end = result
            calls.append(call)
            at = yield from self._reader.skip(end)
        return (calls, end) if calls else None

    def _function(self, at: int) -> Waiting[tuple[ToolCall, int] | None]:
        """The function whose name is at `at`: its parameters, then its end, which may be left out before the tag's."""
        header = yield from self._header(at)
        if header is None:
            return None
        name, at = header
        types = self._tools.get(name) or ParameterTypes(None)
        values: dict[str, Any] = {}
        while True:
            at = yield from self._reader.skip(at)
            tag = yield from self._reader.first_of(at, _AFTER_VALUE)
            if tag != PARAMETER:
                break
            header = yield from self._header(at + len(PARAMETER))
            end = (yield from self._value_end(header[1])) if header else -1
            if header is None or end < 0:
                return None
            values[header[0]] = types.value(header[0], _without_frame(self._reader.text[header[1] : end]))
            at = end + len(END_PARAMETER)
        call = call_of(name, values) if tag else None
        return (call, at + len(END_FUNCTION) * (tag == END_FUNCTION)) if call else None

    def _header(self, at: int) -> Waiting[tuple[str, int] | None]:
        """(name, position after it) in `name>`."""
        end = yield from self._reader.search(_NAME_END, at)
        if end is None or end[0] != ">" or end.start() == at:
            return None
        return self._reader.text[at : end.start()], end.end()

    def _value_end(self, at: int) -> Waiting[int]:
        """Position of the tag that ends a parameter's value, or -1.

        It is followed by the next parameter or by the end of the function or call: other tags belong to the value. So
        do whole parameters in it, whose tags begin a line.
        """
        reader, depth, begin = self._reader, 1, at
        if reader.ended and self._unclosed >= 0 and _NESTED not in reader.text[self._unclosed : at]:
            self._unclosed = at
            return -1
        while 0 < depth <= MAX_DEPTH:
            while (match := _PARAMETER_TAG.search(reader.text, at)) is None:
                if reader.ended:
                    self._unclosed = begin
                    return -1
                at = max(at, _undecided(reader.text, at))
                yield
            depth += 1 if match[0] == _NESTED else -1
            at = match.end()
        return at - len(END_PARAMETER) if depth == 0 else -1


def _undecided(text: str, at: int) -> int:
    """Where, after `at`, a tag of a parameter may begin that is not yet complete with what must follow it."""
    end = text.rfind(END_PARAMETER, at)
    rest = text[end + len(END_PARAMETER) :].lstrip(SPACE)
    if end >= 0 and any(after.startswith(rest) for after in _AFTER_VALUE):
        return end
    return len(text) - max(len(END_PARAMETER), len(_NESTED)) + 1


def _without_frame(text: str) -> str:
    """A value without the line breaks that templates write around it."""
    return text.removeprefix("\n").removesuffix("\n")
