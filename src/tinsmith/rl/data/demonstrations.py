"""What others said, as rows to learn from: beside the policy's own, or alone, where nothing is rolled out.

A lesson is a chat whose last turn (or every turn of the assistant) is learned, or plain text; a pair is one chat with
two ends, to be told apart. No lesson asks what is held out. Leaves out what is made of the rows (`algorithms/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field, model_validator

from tinsmith.errors import ConfigError
from tinsmith.rl.data.ordering import Difficulty, OrderConfig, RowOrder, Shuffle
from tinsmith.rl.data.row_sources import LearnFrom
from tinsmith.rl.data.sources import Sources, as_tuple, reject_fields
from tinsmith.rl.data.tasks import HeldOutTasks, question_key, question_keys
from tinsmith.rl.policy.base import ChatCodec
from tinsmith.rl.policy.training_rows import Kind, TrainingRow
from tinsmith.rl.types import Demonstration, Message
from tinsmith.settings import Settings

_EXPERTS = 2
"""Keeps the order of lessons apart from that of tasks."""


class DemonstrationsConfig(Settings):
    """Data to learn from as it stands: what an expert said, pairs of replies, or plain text."""

    data: Sources
    """Where lessons come from: a source, or a list of them. One that makes its tasks here teaches their answers."""
    learn: LearnFrom = "last"
    """Of a chat: its last turn, or every turn of the assistant; text takes the prompt as plain text."""
    per_step: int = Field(default=0, ge=0)
    """Lessons, or pairs, in each step; 0: as many as `ratio` says, and groups_per_step where nothing is rolled out."""
    ratio: float = Field(default=0.5, gt=0, lt=1)
    """Beside rollouts: the lessons' share of all replies of a step."""
    max_tokens: int = Field(default=0, ge=0)
    """Rows are cut after so many tokens, and left out where nothing to learn remains; 0 is no bound."""
    order: OrderConfig = Shuffle()
    """In what order lessons come."""

    @model_validator(mode="after")
    def _nobody_reports(self) -> DemonstrationsConfig:
        if isinstance(self.order, Difficulty):
            raise ValueError("order difficulty goes by rewards, and lessons have none; choose another")
        return self

    @model_validator(mode="after")
    def _taught_and_not_asked(self) -> DemonstrationsConfig:
        reject_fields(as_tuple(self.data), ("reply_prefix", "extra"), "tasks")
        if self.learn == "text":
            chat = ("system", "system_key", "reply", "chosen", "rejected", "tools_key")
            reject_fields(as_tuple(self.data), chat, "chats")
        if self.per_step and "ratio" in self.model_fields_set:
            raise ValueError("per_step and ratio both say how many lessons a step has; leave out one")
        return self

    def count(self, groups: int, group_size: int, *, alone: bool) -> int:
        """Lessons in a step of so many groups."""
        if self.per_step:
            return self.per_step
        return groups if alone else max(1, round(groups * group_size * self.ratio / (1 - self.ratio)))


@dataclass(frozen=True, slots=True)
class _Source:
    demonstrations: Sequence[Demonstration]
    row_order: RowOrder


class Demonstrations:
    """Rows without end. `cursor` counts the lessons drawn."""

    def __init__(
        self, config: DemonstrationsConfig, held_out: HeldOutTasks, codec: ChatCodec, seed: int, *, pairs: bool
    ) -> None:
        """`pairs`: each lesson is to be two rows, the chosen one and the rejected."""
        self._config, self._codec, self._pairs, self._seed = config, codec, pairs, seed
        self._banned = question_keys(held_out)
        self._sources: list[_Source] = []
        for number, source in enumerate(as_tuple(config.data)):
            lessons = source.demonstrations(config.learn)
            if len(lessons):
                _check_pair(lessons[0], pairs)
                lane = config.order.row_order(np.arange(len(lessons)), source.feature, (seed, _EXPERTS, number))
                self._sources.append(_Source(lessons, lane))
        self.size = sum(len(source.demonstrations) for source in self._sources)
        if not self.size:
            raise ConfigError("experts.data has no rows.", "Check its path and operators.")
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0))
        self.cursor = 0

    def draw(self, count: int) -> list[TrainingRow]:
        """The rows of the next `count` lessons; the two of a pair stand side by side."""
        rows: list[TrainingRow] = []
        found = passed_over = 0
        while found < count:
            lesson = self._next()
            if taught := [] if self._held_out(lesson) else self._rows(lesson):
                rows += taught
                found, passed_over = found + 1, 0
            elif (passed_over := passed_over + 1) > 2 * self.size:
                raise ConfigError(
                    "experts.data has nothing to learn: all of it is held out, or cut away by experts.max_tokens.",
                    "Raise max_tokens, or hold out other tasks.",
                )
        return rows

    def _next(self) -> Demonstration:
        """Sources are mixed in proportion to their sizes, drawn anew for each epoch."""
        epoch, place = divmod(self.cursor, self.size)
        if self._order[0] != epoch:
            sizes = [len(source.demonstrations) for source in self._sources]
            turns = np.repeat(np.arange(len(sizes)), sizes)
            if len(sizes) > 1:
                turns = np.random.default_rng((self._seed, _EXPERTS, epoch)).permutation(turns)
            self._order = (epoch, turns)
        self.cursor += 1
        turns = self._order[1]
        number = int(turns[place])
        source = self._sources[number]
        draw = epoch * len(source.demonstrations) + int((turns[:place] == number).sum())
        return source.demonstrations[source.row_order.pick(draw, ())]

    def _held_out(self, lesson: Demonstration) -> bool:
        """Whether a turn that would be learned answers what is held out; plain text asks nothing."""
        if self._config.learn == "text":
            return False
        chats = [lesson.messages, *([lesson.rejected] if lesson.rejected else [])]
        if self._config.learn == "all":
            chats += [chat[:end] for chat in chats for end, one in enumerate(chat) if one.role == "assistant"]
        return any(question_key(chat) in self._banned for chat in chats)

    def _rows(self, lesson: Demonstration) -> list[TrainingRow]:
        """None where a cut leaves nothing to learn."""
        _check_pair(lesson, self._pairs)
        ends: list[tuple[tuple[Message, ...], Kind]] = [(lesson.messages, "chosen" if self._pairs else "expert")]
        if self._pairs:
            ends.append((lesson.rejected, "rejected"))
        rows = [self._row(lesson, messages, kind) for messages, kind in ends]
        return [] if any(not row.mask.any() for row in rows) else rows

    def _row(self, lesson: Demonstration, messages: Sequence[Message], kind: Kind) -> TrainingRow:
        if self._config.learn == "text":
            tokens = self._codec.encode_text(messages[-1].content)
            mask = [True] * len(tokens)
        else:
            tokens, mask = self._codec.encode_with_loss_mask(messages, lesson.tools, every=self._config.learn == "all")
        end = self._config.max_tokens or len(tokens)
        tokens, mask = tokens[:end], mask[:end]
        nothing = np.zeros(max(0, len(tokens) - 1), np.float32)
        return TrainingRow(
            tokens=np.array(tokens[:-1], np.int64),
            targets=np.array(tokens[1:], np.int64),
            logprobs=nothing,
            advantages=nothing,
            mask=np.array(mask[1:], bool),
            kind=kind,
        )


def _check_pair(lesson: Demonstration, pairs: bool) -> None:
    if pairs and not lesson.rejected:
        raise ConfigError(f"{lesson.id} is no pair.", "Set chosen and rejected on experts.data.")
    if lesson.rejected and not pairs:
        raise ConfigError(f"{lesson.id} is a pair, and nothing here tells two replies apart.", "Take dpo.")
