"""Text that arrives in pieces, for grammars written as generators: they yield while they wait for more of it.

A grammar waits only for what it needs to decide, so its result does not depend on the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tinsmith.chat.strict_json import MAX_DEPTH

T = TypeVar("T")
Waiting = Generator[None, None, T]
"""A computation that yields while it waits for text."""

SPACE = " \t\r\n"
# Where a scan of JSON stops: at the end of a string, an escape or a control character; at a bracket, a quote or a
# character that no JSON has outside of strings.
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_OUTSIDE = re.compile(r"[^ \t\r\n\d:,+\-.eEtrufalsn]")


@dataclass(slots=True)
class Reader:
    """The text from `at` on is not yet used; positions are indices of `text`."""

    text: str = ""
    at: int = 0
    ended: bool = False

    def add(self, text: str) -> None:
        """Append a piece."""
        self.text += text

    def compact(self) -> None:
        """Forget the text before `at`; positions from before are no longer valid."""
        self.text, self.at = self.text[self.at :], 0

    def wait(self, size: int) -> Waiting[str]:
        """Wait for `size` characters in all; returns the last of them, or an empty string after the end."""
        while len(self.text) < size and not self.ended:
            yield
        return self.text[size - 1 : size]

    def first_of(self, at: int, texts: Sequence[str]) -> Waiting[str]:
        """The longest of `texts` that begins at `at`; empty if none does."""
        while not self.ended:
            rest = self.text[at : at + max(map(len, texts))]
            if not any(len(rest) < len(text) and text.startswith(rest) for text in texts):
                break
            yield
        return max((text for text in texts if self.text.startswith(text, at)), key=len, default="")

    def skip(self, at: int, characters: str = SPACE) -> Waiting[int]:
        """Position of the next character that is none of `characters`."""
        while (yield from self.wait(at + 1)) and self.text[at] in characters:
            at += 1
        return at

    def search(self, pattern: re.Pattern[str], at: int) -> Waiting[re.Match[str] | None]:
        """The first match of a pattern of single characters; None if the text ends without it."""
        while (match := pattern.search(self.text, at)) is None and not self.ended:
            at = len(self.text)
            yield
        return match

    def run_end(self, at: int) -> Waiting[int]:
        """Position after the run of equal characters that begins at `at`."""
        return (yield from self.skip(at, self.text[at]))

    def json_end(self, at: int) -> Waiting[int]:
        """Position after the object or list that begins at `at`; -1 if it is not one or is not complete at the end."""
        if (yield from self.wait(at + 1)) not in ("{", "["):
            return -1
        depth, in_string = 0, False
        while (match := (yield from self.search(_IN_STRING if in_string else _OUTSIDE, at))) is not None:
            at = match.end()
            character = match[0]
            if character == '"':
                in_string = not in_string
            elif in_string:
                if character != "\\" or not (yield from self.wait(at + 1)):
                    return -1
                at += 1
            elif character in "{[":
                depth += 1
                if depth > MAX_DEPTH:
                    return -1
            elif character in "}]":
                depth -= 1
                if depth == 0:
                    return at
            else:
                return -1
        return -1
