"""One choice of an answer as it grows: tokens in; out comes text that will not be taken back, and tool calls.

Held back are half characters, what may be the beginning of a stop string, and what may be a tool call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tinsmith.openai.toolcalls import Call, Reading, held_back
from tinsmith.service.openai.texts import Growing

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What a choice has grown by."""

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(slots=True, kw_only=True)
class Choice:
    """`stops` end the text, and are in it only if `stops_stay`."""

    growing: Growing
    stops: Sequence[str] = ()
    stops_stay: bool = False
    reading: Reading | None = None
    stopped: bool = False
    calls: int = 0
    _held: str = field(default="")

    def feed(self, tokens: Iterable[int]) -> Grown:
        """The next tokens."""
        return self._read(self._cut(self.growing.feed(tokens)))

    def end(self) -> Grown:
        """No more tokens will come."""
        text = self._cut(self.growing.end()) + self._held
        self._held = ""
        first = self._read(text)
        if self.reading is None:
            return first
        rest, calls = self.reading.end()
        self.calls += len(calls)
        return Grown(text=first.text + rest, calls=(*first.calls, *calls))

    def finish(self, stop_reason: Literal["stop", "length"]) -> Finish:
        """Why it ended, once it has."""
        reason = "stop" if self.stopped else stop_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    def _cut(self, text: str) -> str:
        """Text up to a stop string; its possible beginning is held."""
        if self.stopped:
            return ""
        self._held += text
        places = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if places:
            at, stop = min(places)
            self.stopped = True
            text, self._held = self._held[: at + len(stop) * self.stops_stay], ""
            return text
        keep = held_back(self._held, self.stops)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def _read(self, text: str) -> Grown:
        if self.reading is None:
            return Grown(text=text)
        said, calls = self.reading.feed(text)
        self.calls += len(calls)
        return Grown(text=said, calls=tuple(calls))
