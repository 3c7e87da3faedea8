"""Parse one reply while it arrives: text that cannot be part of a call, and calls once they are complete.

A marker counts as the beginning of a call by its place: not in reasoning, not in code or a quotation of Markdown, and
within a line of prose only if the reply ends with the call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.chat.tool_calls.arguments import ToolCall
from tinsmith.chat.tool_calls.formats import ToolCallFormat, partial_match
from tinsmith.chat.tool_calls.grammar import Calls, Grammar
from tinsmith.chat.tool_calls.reader import SPACE, Reader, Waiting

_LINE_END = re.compile(r"\n")
_LINE_END_OR_BACKTICK = re.compile(r"[\n`]")
_FENCE = 3
"""Backticks or tildes at the start of a line that begin a block of code, at least."""


def parse_reply(text: str, form: ToolCallFormat, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
    """(text, calls) of a whole reply."""
    parser = ToolCallParser(form, tools)
    said, calls = parser.feed(text)
    rest, last_calls = parser.end()
    return said + rest, [*calls, *last_calls]


class ToolCallParser:
    """Incremental parser of one reply. Its result does not depend on the pieces in which the reply arrives."""

    def __init__(self, form: ToolCallFormat, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._form = form
        self._reader = Reader()
        self._grammar = Grammar(self._reader, tools)
        self._ends = dict(form.thinking)
        self._literals = (*form.markers, *self._ends)
        self._tokens = re.compile("|".join((*map(re.escape, self._literals), r"\n", "`+", "~+")))
        self._machine = self._read()
        self._text: list[str] = []
        self._calls: list[ToolCall] = []
        self._space: list[str] = []
        # Whether the text since the last call, or the beginning, is only space, which is dropped before a call.
        self._is_space, self._has_calls = True, False
        # Of the line so far: whether it is blank, and whether it is a quotation.
        self._blank, self._quotation = True, False
        self._span = ""
        """Backticks that began a code span, if it is one: others as many must follow in the paragraph."""

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add `text`; returns (text, calls) that are certain."""
        self._reader.add(text)
        next(self._machine, None)
        return self._take()

    def end(self) -> tuple[str, list[ToolCall]]:
        """End of the reply: the remaining (text, calls)."""
        self._reader.ended = True
        next(self._machine, None)
        if not self._has_calls:
            self._text += self._space
        return self._take()

    def _take(self) -> tuple[str, list[ToolCall]]:
        text, calls = "".join(self._text), self._calls
        self._text, self._calls = [], []
        return text, calls

    def _read(self) -> Waiting[None]:
        """The whole reply."""
        reader = self._reader
        if self._form.until:
            yield from self._think(reader.at, self._form.until)
        yield from self._bare_start()
        while True:
            match = self._tokens.search(reader.text, reader.at)
            if match is None:
                hold = 0 if reader.ended else partial_match(reader.text[reader.at :], self._literals)
                self._pass(len(reader.text) - hold)
                if reader.ended:
                    return
                reader.compact()
                yield
            else:
                self._pass(match.start())
                yield from self._token(match[0])

    def _token(self, token: str) -> Waiting[None]:
        """Go on from a token at the reader's position."""
        at = self._reader.at
        if token == "\n":
            self._span = "" if self._blank else self._span
            self._pass(at + 1)
        elif token[0] in "`~":
            yield from self._run(at)
        elif token in self._ends:
            yield from self._thinking(at, token)
        else:
            yield from self._marker(at, token)

    def _pass(self, to: int) -> None:
        """Return the text up to `to`."""
        text, self._reader.at = self._reader.text[self._reader.at : to], to
        if "\n" in text:
            text_of_line = text.rpartition("\n")[2]
            self._blank, self._quotation = True, False
        else:
            text_of_line = text
        if self._blank and (line := text_of_line.lstrip(SPACE)):
            self._blank, self._quotation = False, line[0] == ">"
        self._space.append(text)
        self._is_space = self._is_space and not text.strip()
        if not self._is_space:
            self._text += self._space
            self._space.clear()

    def _call(self, calls: Sequence[ToolCall], end: int) -> None:
        """Return calls that end at `end`; space before them is dropped."""
        self._calls += calls
        self._space.clear()
        self._is_space = self._has_calls = True
        self._reader.at = end
        self._new_line()

    def _new_line(self) -> None:
        """What follows is as at the start of a line."""
        self._blank, self._quotation, self._span = True, False, ""

    def _bare_start(self) -> Waiting[None]:
        """Calls without a marker: from here to the end of the reply."""
        if self._form.syntax != "bare":
            return
        reader = self._reader
        at = yield from reader.skip(reader.at)
        result = (yield from self._grammar.bare(at)) if (yield from reader.wait(at + 1)) == "{" else None
        if result and not (yield from reader.wait((yield from reader.skip(result[1], SPACE + ";")) + 1)):
            self._call(result[0], len(reader.text))

    def _thinking(self, at: int, begin: str) -> Waiting[None]:
        """Reasoning that begins at `at`, unless the marker is in code or a quotation."""
        if self._quotation or (yield from self._is_code(at + len(begin))):
            self._pass(max(self._reader.at, at + len(begin)))
        else:
            yield from self._think(at + len(begin), self._ends[begin])
            yield from self._bare_start()

    def _think(self, at: int, end: str) -> Waiting[None]:
        """Pass the text to the end of the reasoning, whose marker follows `at`."""
        reader = self._reader
        self._pass(at)
        while (result := reader.text.find(end, reader.at)) < 0:
            self._pass(len(reader.text) - (0 if reader.ended else partial_match(reader.text[reader.at :], (end,))))
            if reader.ended:
                return
            reader.compact()
            yield
        self._pass(result + len(end))
        self._new_line()

    def _marker(self, at: int, marker: str) -> Waiting[None]:
        """The calls of a marker at `at`, or its text."""
        result = (yield from self._grammar.calls(marker, at)) if not self._quotation else None
        if result is None:
            self._pass(at + len(marker))
        elif not (yield from self._is_code(result[1])):
            if self._blank:
                self._call(*result)
            else:
                yield from self._within_line(result)

    def _within_line(self, first: Calls) -> Waiting[None]:
        """Calls that begin within a line of prose: text, unless only calls follow up to the end of the reply."""
        reader, (calls, end) = self._reader, first
        prose_end, is_line = end, True
        while True:
            at = yield from reader.skip(end)
            if not (yield from reader.wait(at + 1)):
                self._call(calls, len(reader.text))
                return
            marker = yield from reader.first_of(at, self._form.markers)
            result = (yield from self._grammar.calls(marker, at)) if marker else None
            if result is None:
                self._pass(prose_end)
                return
            is_line = is_line and "\n" not in reader.text[end:at]
            calls, end = [*calls, *result[0]], result[1]
            prose_end = end if is_line else prose_end

    def _run(self, at: int) -> Waiting[None]:
        """Backticks or tildes at `at`: a block of code, the beginning or end of a code span, or text."""
        reader = self._reader
        end = yield from reader.run_end(at)
        run = reader.text[at:end]
        if self._blank and len(run) >= _FENCE:
            line_end = yield from reader.search(_LINE_END_OR_BACKTICK if run[0] == "`" else _LINE_END, end)
            if line_end is None or line_end[0] == "\n":
                self._pass(line_end.end() if line_end else len(reader.text))
                yield from self._block(run)
                return
        if run[0] == "`":
            self._span = run if not self._span else "" if len(self._span) == len(run) else self._span
        self._pass(end)

    def _block(self, fence: str) -> Waiting[None]:
        """Pass a block of code, from its first line to the fence that closes it or the end of the reply."""
        reader = self._reader
        self._span = ""
        while True:
            at = yield from reader.skip(reader.at, " \t")
            if (yield from reader.wait(at + 1)) == fence[0]:
                end = yield from reader.run_end(at)
                after = yield from reader.skip(end, " \t\r")
                closes = (yield from reader.wait(after + 1)) in ("", "\n")
                if end - at >= len(fence) and (closes or (yield from reader.first_of(after, self._form.markers))):
                    self._pass(after)
                    self._new_line()
                    return
            if not (yield from self._pass_line()):
                return

    def _pass_line(self) -> Waiting[bool]:
        """Pass the rest of a line as it arrives; returns whether another follows."""
        reader = self._reader
        while (end := reader.text.find("\n", reader.at)) < 0:
            self._pass(len(reader.text))
            if reader.ended:
                return False
            reader.compact()
            yield
        self._pass(end + 1)
        return True

    def _is_code(self, at: int) -> Waiting[bool]:
        """Whether the text up to `at` ends in a code span, which is then passed: its backticks must follow.

        A span ends with its paragraph, and without an end its backticks are text.
        """
        reader, size, position = self._reader, len(self._span), at
        while size and (match := (yield from reader.search(_LINE_END_OR_BACKTICK, position))) is not None:
            if match[0] == "`":
                position = yield from reader.run_end(match.start())
                if position - match.start() == size:
                    self._span = ""
                    self._pass(position)
                    return True
            else:
                position = yield from reader.skip(match.end(), " \t\r")
                if (yield from reader.wait(position + 1)) in ("", "\n"):
                    break
        self._span = ""
        return False
