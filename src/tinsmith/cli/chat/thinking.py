"""What a model thinks before it answers, separated from the answer while the reply is sampled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tinsmith.chat.tool_calls.formats import THINKING

_BEGINS = tuple(begin for begin, _ in THINKING)
_BEGIN = re.compile("|".join(map(re.escape, _BEGINS)))
_ENDS = dict(THINKING)


@dataclass(slots=True)
class ThinkingSplitter:
    """Divides a reply that comes in pieces into thinking and answer, without the marks between them.

    Example: list(ThinkingSplitter().feed("<think>39 + 13</think>52")) == [(True, "39 + 13"), (False, "52")]
    """

    end: str = ""
    """The mark that ends the thinking in progress; empty outside."""
    _rest: str = field(default="")
    """Text that may be the beginning of a mark."""

    def feed(self, text: str) -> Iterator[tuple[bool, str]]:
        """(whether it is thinking, text) of what is certain by now."""
        text, self._rest = self._rest + text, ""
        while text:
            start, after, following = self._next_mark(text)
            if after:
                yield from self._part(text[:start])
                self.end, text = following, text[after:]
                continue
            held = _held(text, (self.end,) if self.end else _BEGINS)
            self._rest = text[len(text) - held :]
            yield from self._part(text[: len(text) - held])
            return

    def finish(self) -> Iterator[tuple[bool, str]]:
        """What is left at the end of the reply."""
        yield from self._part(self._rest)
        self._rest = ""

    def _next_mark(self, text: str) -> tuple[int, int, str]:
        """Where the next mark begins and where it ends, which is 0 if there is none, and the `end` after it."""
        if self.end:
            start = text.find(self.end)
            return (start, start + len(self.end), "") if start >= 0 else (0, 0, "")
        match = _BEGIN.search(text)
        return (match.start(), match.end(), _ENDS[match[0]]) if match else (0, 0, "")

    def _part(self, text: str) -> Iterator[tuple[bool, str]]:
        if text:
            yield bool(self.end), text


def _held(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of the text that begins one of the marks."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
