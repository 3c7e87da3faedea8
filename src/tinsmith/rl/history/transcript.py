"""A rollout as it is shown: what was sent, and replies in pieces of text, thinking and tool calls, with their tokens.

`transcript` takes a record of rollouts/ as it is: fields that are missing or of another type are empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinsmith.rl.history.rows import finite, integer, items, records, text

Measure = Literal["logprob", "advantage", "difference"]
"""What tokens are colored by; `difference` is the trainer's logprob minus the sampler's."""

PieceKind = Literal["text", "thinking", "tool_call", "tool_response"]

_MARKS: tuple[tuple[PieceKind, str, str], ...] = (
    ("thinking", "<think>", "</think>"),
    ("thinking", "<thinking>", "</thinking>"),
    ("tool_call", "<tool_call>", "</tool_call>"),
    ("tool_response", "<tool_response>", "</tool_response>"),
)
_BEGIN = re.compile("|".join(re.escape(begin) for _, begin, _ in _MARKS))
_RARE_LOGPROB, _LARGE_DIFFERENCE = 6.0, 0.5
LEVELS = 5
"""Shades of a color."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text.

    Example: Piece("thinking", "39 + 13 is 52")
    """

    kind: PieceKind
    text: str


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A sampled token."""

    id: int
    text: str
    logprob: float | None
    trainer_logprob: float | None
    """None of a token that was not trained on, as `advantage` is."""
    advantage: float | None

    def value(self, measure: Measure) -> float | None:
        """The value that the token is colored by."""
        if measure == "logprob":
            return self.logprob
        if measure == "advantage":
            return self.advantage
        if self.logprob is None or self.trainer_logprob is None:
            return None
        return self.trainer_logprob - self.logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """A reply and what was sent before it."""

    input: str
    """Text that was sent; of a turn that continues the one before, what was added."""
    text: str
    tokens: Sequence[TokenRecord]
    stop: str
    model: str
    version: int
    reward: float | None

    @property
    def pieces(self) -> list[Piece]:
        """The reply in pieces."""
        return pieces_of(self.text, is_thinking=self.input.rstrip().endswith(("<think>", "<thinking>")))

    def largest(self, measure: Measure) -> float:
        """The value that has the full color: of advantages, the largest; else a fixed one."""
        if measure != "advantage":
            return _RARE_LOGPROB if measure == "logprob" else _LARGE_DIFFERENCE
        return max((abs(token.advantage or 0.0) for token in self.tokens), default=0.0) or 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRecord:
    """The turns of a role."""

    role: str
    reward: float | None
    trained: bool
    turns: Sequence[TurnRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A rollout as it is shown.

    Example: transcript(history.rollouts.read(row)).trajectories[0].turns[0].pieces
    """

    task: str
    messages: Sequence[tuple[str, str]]
    """(role, content) of the task's messages."""
    answer: str
    reward: float | None
    reward_parts: Mapping[str, float | None]
    metrics: Mapping[str, float | None]
    correct: bool | None
    termination: str
    error: str
    version: int
    trajectories: Sequence[TrajectoryRecord] = field(default=())

    @property
    def sent(self) -> str:
        """The text that was sent first; empty if it was not recorded."""
        return next((turn.input for each in self.trajectories for turn in each.turns), "")


def transcript(record: Mapping[str, Any]) -> Transcript:
    """The transcript of a record of rollouts/."""
    correct = record.get("correct")
    trajectories = [
        TrajectoryRecord(
            role=text(each.get("role")),
            reward=finite(each.get("reward")),
            trained=each.get("trained") is not False,
            turns=[_turn(turn) for turn in records(each.get("turns"))],
        )
        for each in records(record.get("trajectories"))
    ]
    return Transcript(
        task=text(record.get("task")),
        messages=[(text(each.get("role")), text(each.get("content"))) for each in records(record.get("messages"))],
        answer=text(record.get("answer")),
        reward=finite(record.get("reward")),
        reward_parts=_numbers(record.get("reward_parts")),
        metrics=_numbers(record.get("metrics")),
        correct=correct if isinstance(correct, bool) else None,
        termination=text(record.get("termination")),
        error=text(record.get("error")),
        version=integer(record.get("version")),
        trajectories=trajectories,
    )


def pieces_of(content: str, *, is_thinking: bool = False) -> list[Piece]:
    """A text in pieces. A mark without an end holds to the end; `is_thinking`: the text begins within thinking."""
    pieces: list[Piece] = []
    at, length = 0, len(content)
    end = min((place for place in (content.find("</think>"), content.find("</thinking>")) if place >= 0), default=-1)
    begin = _BEGIN.search(content)
    if is_thinking or (end >= 0 and (begin is None or end < begin.start())):
        stop = end if end >= 0 else length
        pieces.append(Piece("thinking", content[:stop].strip()))
        at = content.find(">", stop) + 1 if end >= 0 else length
    while match := _BEGIN.search(content, at):
        kind, begin_mark, end_mark = next(mark for mark in _MARKS if mark[1] == match[0])
        stop = content.find(end_mark, match.end())
        pieces.append(Piece("text", content[at : match.start()].strip()))
        pieces.append(Piece(kind, content[match.start() + len(begin_mark) : stop if stop >= 0 else None].strip()))
        at = stop + len(end_mark) if stop >= 0 else length
    return [piece for piece in (*pieces, Piece("text", content[at:].strip())) if piece.text]


def level(value: float | None, largest: float) -> int:
    """The shade of a value, from -LEVELS to LEVELS; 0 is none."""
    if value is None or not math.isfinite(value):
        return 0
    return round(LEVELS * max(-1.0, min(1.0, value / largest)))


def _turn(turn: Mapping[str, Any]) -> TurnRecord:
    ids, texts = items(turn.get("tokens")), items(turn.get("token_texts"))
    logprobs, trainer, advantages = (turn.get(name) for name in ("logprobs", "trainer_logprobs", "advantages"))
    return TurnRecord(
        input=text(turn.get("input")),
        text=text(turn.get("text")),
        tokens=[
            TokenRecord(
                integer(token),
                text(_at(texts, at)) if texts else f"[{integer(token)}]",
                finite(_at(items(logprobs), at)),
                finite(_at(items(trainer), at)),
                finite(_at(advantages, at)) if isinstance(advantages, list) else finite(advantages),
            )
            for at, token in enumerate(ids)
        ],
        stop=text(turn.get("stop")),
        model=text(turn.get("model")),
        version=integer(turn.get("version")),
        reward=finite(turn.get("reward")),
    )


def _at(values: Sequence[Any], at: int) -> Any:
    return values[at] if at < len(values) else None


def _numbers(values: Any) -> dict[str, float | None]:
    return {str(name): finite(value) for name, value in values.items()} if isinstance(values, dict) else {}
