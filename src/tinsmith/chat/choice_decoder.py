"""From the tokens of a reply, while they arrive, to its text up to a stop string and its tool calls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tinsmith.chat.detokenizer import Detokenizer
from tinsmith.chat.tool_calls.arguments import ToolCall
from tinsmith.chat.tool_calls.formats import partial_match
from tinsmith.chat.tool_calls.parser import ToolCallParser

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text and tool calls of a choice."""

    text: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundStop:
    """A stop string, and the character at which it begins."""

    text: str
    start: int


class StopStrings:
    """Finds the first stop string in a text with all special tokens, as the engine does."""

    def __init__(self, stops: Sequence[str], full: Detokenizer) -> None:
        self.full = full
        """Decodes the tokens with special tokens."""
        self._stops = stops
        self._tail = ""
        """The end of the text, if it may begin a stop string."""

    @property
    def safe(self) -> int:
        """Characters of the text that no stop string can begin in."""
        return self.full.length - len(self._tail)

    def feed(self, token: int) -> FoundStop | None:
        """Add a token."""
        return self._find(self.full.feed(token))

    def end(self) -> FoundStop | None:
        """End the text."""
        return self._find(self.full.end())

    def _find(self, added: str) -> FoundStop | None:
        self._tail += added
        matches = [(at, stop) for stop in self._stops if (at := self._tail.find(stop)) >= 0]
        if matches:
            at, text = min(matches)
            return FoundStop(text, self.safe + at)
        self._tail = self._tail[len(self._tail) - partial_match(self._tail, self._stops) :]
        return None


@dataclass(slots=True, kw_only=True)
class ChoiceDecoder:
    """Decodes one choice incrementally: tokens in, text and tool calls that are final out.

    Text that further tokens may change, possible beginnings of a stop string and possible tool calls are held back.
    """

    detokenizer: Detokenizer
    stops: StopStrings | None = None
    include_stop: bool = False
    """Whether the text ends with the stop string rather than before it."""
    parser: ToolCallParser | None = None
    stopped: bool = False
    calls: int = 0
    offsets: list[int] = field(default_factory=list)
    """Characters before each token's text, of the tokens up to the end of the text that is not held back."""
    _released: int = 0
    """Characters of the text that are not held back."""
    _held: str = ""

    def feed(self, tokens: Iterable[int]) -> TextDelta:
        """Add tokens."""
        parts = []
        for token in tokens:
            if self.stopped:
                self.offsets.append(self._released)
                continue
            self._held += self.detokenizer.feed(token)
            stop = self.stops.feed(token) if self.stops else None
            parts.append(self._stop(self.stops, stop) if self.stops and stop else self._release())
        return self._parse("".join(parts))

    def end(self) -> TextDelta:
        """The remaining text and calls after the last token."""
        text = ""
        if not self.stopped:
            self._held += self.detokenizer.end()
            stop = self.stops.end() if self.stops else None
            text = self._stop(self.stops, stop) if self.stops and stop else self._release(everything=True)
        delta = self._parse(text)
        if self.parser is None:
            return delta
        rest, calls = self.parser.end()
        self.calls += len(calls)
        return TextDelta(text=delta.text + rest, calls=(*delta.calls, *calls))

    def finish_reason(self, stop_reason: Literal["stop", "length"]) -> FinishReason:
        """The choice's finish reason, after `end`."""
        reason = "stop" if self.stopped else stop_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    def _release(self, *, everything: bool = False) -> str:
        """The held text, up to the possible beginning of a stop string unless it is the last."""
        size = len(self._held)
        if self.stops and not everything:
            size = max(0, self._position(self.stops.full, self.stops.safe) - self._released)
        text, self._held = self._held[:size], self._held[size:]
        self._released += len(text)
        starts = self.detokenizer.starts
        while len(self.offsets) < len(starts) and starts[len(self.offsets)] <= self._released:
            self.offsets.append(starts[len(self.offsets)])
        return text

    def _stop(self, stops: StopStrings, stop: FoundStop) -> str:
        """The held text up to the stop string, and the stop string if it is included."""
        self.stopped = True
        self._held += self.detokenizer.end()
        cut = max(self._released, self._position(stops.full, stop.start))
        text, included = self._held[: cut - self._released], stop.text if self.include_stop else ""
        for start, full in list(zip(self.detokenizer.starts, stops.full.starts, strict=False))[len(self.offsets) :]:
            is_before = full < stop.start
            self.offsets.append(min(start, cut) if is_before else cut + min(full - stop.start, len(included)))
        self._released, self._held = cut + len(included), ""
        return text + included

    def _position(self, full: Detokenizer, at: int) -> int:
        """Position in this text of a position in the text with special tokens."""
        own, token = self.detokenizer, bisect_right(full.starts, at) - 1
        if not 0 <= token < len(own.starts):
            return own.length
        start = own.starts[token]
        if at == full.starts[token]:
            return start
        full_end = full.starts[token + 1] if token + 1 < len(full.starts) else full.length
        end = own.starts[token + 1] if token + 1 < len(own.starts) else own.length
        return max(start, end - (full_end - at))

    def _parse(self, text: str) -> TextDelta:
        if self.parser is None:
            return TextDelta(text=text)
        text, calls = self.parser.feed(text)
        self.calls += len(calls)
        return TextDelta(text=text, calls=tuple(calls))
