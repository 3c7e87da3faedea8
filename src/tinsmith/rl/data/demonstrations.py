"""Demonstrations: chats, reply pairs or plain text to learn from, alone or in addition to rollouts.

A demonstration is a chat whose last turn (or every assistant turn) is learned, or plain text. A pair is a chat with a
chosen and a rejected reply; a chat with a label has a reply that is good or bad. Demonstrations that ask a held-out
question are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field, model_validator

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.data.ordering import Difficulty, LoadedSource, OrderConfig, RowOrder, Shuffle
from tinsmith.rl.data.row_mapping import RowMapping
from tinsmith.rl.data.row_sources import LearnFrom
from tinsmith.rl.data.sources import Sources, as_tuple, reject_fields
from tinsmith.rl.data.tasks import HeldOutTasks, question_key, question_keys
from tinsmith.rl.policy.chat import ChatCodec, Verdict
from tinsmith.rl.policy.training_rows import Kind, TrainingRow
from tinsmith.rl.types import Demonstration, Message
from tinsmith.settings import Settings

_SEED_STREAM = 2
"""Separates the order of demonstrations from the order of tasks."""


class DemonstrationsConfig(Settings):
    """Data to learn from: chats, pairs of replies, replies with labels, or plain text."""

    data: Sources
    """A source, or a list of sources. A source that generates tasks demonstrates their answers."""
    learn: LearnFrom = "last"
    """What to learn of a chat: its last turn (`last`) or every assistant turn (`all`); `text` learns the prompt as
    plain text. With `all`, a chat is one training row, or several where the chat template renders a reply differently
    once others follow (without its reasoning, for example)."""
    per_step: int = Field(default=0, ge=0)
    """Demonstrations, or pairs, in each step; 0: as many as `ratio` says, or groups_per_step in a run without
    rollouts."""
    ratio: float = Field(default=0.5, gt=0, lt=1)
    """Share of demonstrations among all replies of a step that also has rollouts."""
    max_tokens: int = Field(default=0, ge=0)
    """Truncate rows to this many tokens and skip rows with nothing left to learn; 0 is no limit."""
    order: OrderConfig = Shuffle()
    """Order of the demonstrations."""

    @model_validator(mode="after")
    def _check_order(self) -> DemonstrationsConfig:
        if isinstance(self.order, Difficulty):
            raise ValueError("order difficulty needs rewards, and demonstrations have none; choose another order")
        return self

    @model_validator(mode="after")
    def _check_fields_of_sources(self) -> DemonstrationsConfig:
        reject_fields(as_tuple(self.data), ("reply_prefix", "extra", "images"), "tasks")
        if self.learn == "text":
            chat = ("system", "system_key", "reply", "chosen", "rejected", "label_key", "tools_key")
            reject_fields(as_tuple(self.data), chat, "chats")
        for source in as_tuple(self.data):
            if isinstance(source, RowMapping) and source.label_key and (source.chosen or source.rejected):
                raise ValueError("label_key applies only to single replies; leave it out, or chosen and rejected")
        if self.per_step and "ratio" in self.model_fields_set:
            raise ValueError("per_step and ratio both set the number of demonstrations in a step; leave out one")
        return self

    def load(self) -> list[Sequence[Demonstration]]:
        """Demonstrations of each source."""
        return [source.demonstrations(self.learn) for source in as_tuple(self.data)]

    def count(self, groups: int, group_size: int, *, alone: bool) -> int:
        """Number of demonstrations in a step with that many groups; `alone`: in a run without rollouts."""
        if self.per_step:
            return self.per_step
        return groups if alone else max(1, round(groups * group_size * self.ratio / (1 - self.ratio)))


@dataclass(frozen=True, slots=True)
class _OrderedSource:
    demonstrations: Sequence[Demonstration]
    row_order: RowOrder


class Demonstrations:
    """Endless sequence of training rows. `cursor` counts the demonstrations drawn."""

    def __init__(
        self,
        config: DemonstrationsConfig,
        loaded: Sequence[Sequence[Demonstration]],
        held_out: HeldOutTasks,
        codec: ChatCodec,
        seed: int,
        *,
        pairs: bool,
        labels: bool = False,
        mismatched: bool = False,
        verdict: Verdict | None = None,
    ) -> None:
        """`loaded` are the demonstrations of each source of `config`. With `pairs`, each demonstration gives two rows:
        the chosen reply and the rejected one; with `labels`, or one row, of a reply with a label; with `mismatched`,
        also the replies after the prompt of another one; with `verdict`, only that of a reward model is learned."""
        self._config, self._codec, self._pairs, self._labels, self._seed = config, codec, pairs, labels, seed
        self._mismatched, self._verdict = mismatched, verdict
        self._held_out_keys = question_keys(held_out)
        self._sources: list[_OrderedSource] = []
        for number, (source, demonstrations) in enumerate(zip(as_tuple(config.data), loaded, strict=True)):
            if len(demonstrations):
                check_pair(demonstrations[0], pairs, labels)
                row_order = config.order.row_order(
                    np.arange(len(demonstrations)),
                    LoadedSource(demonstrations, source.feature),
                    (seed, _SEED_STREAM, number),
                )
                self._sources.append(_OrderedSource(demonstrations, row_order))
        self.size = sum(len(source.demonstrations) for source in self._sources)
        if not self.size:
            raise ConfigError("demonstrations.data has no rows.", "Check its path and operators.")
        self._epoch: tuple[int, np.ndarray] = (-1, np.zeros(0))
        self.cursor = 0

    def draw(self, count: int) -> list[TrainingRow]:
        """Rows of the next `count` demonstrations; the rows of a pair are adjacent, the chosen reply first."""
        rows: list[TrainingRow] = []
        drawn = skipped = 0
        while drawn < count:
            demonstration = self._next()
            if new := [] if self._is_held_out(demonstration) else self._rows(demonstration):
                rows += new
                drawn, skipped = drawn + 1, 0
            elif (skipped := skipped + 1) > 2 * self.size:
                raise ConfigError(
                    "demonstrations.data has nothing to learn from: every row is held out, or truncated by "
                    "demonstrations.max_tokens.",
                    "Raise max_tokens, or hold out other tasks.",
                )
        return self._with_mismatched(rows) if self._mismatched else rows

    def _with_mismatched(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """The rows of pairs and single replies, each followed by its replies after the next prompt that is another one.

        Raises ConfigError if all have the same prompt.
        """
        starts = [at for at, row in enumerate(rows) if row.kind != "rejected"]
        drawn = [rows[begin:end] for begin, end in zip(starts, [*starts[1:], len(rows)], strict=True)]
        with_others: list[TrainingRow] = []
        for at, replies in enumerate(drawn):
            others = (each[0] for each in (*drawn[at + 1 :], *drawn[:at]))
            other = next((row for row in others if _prompt(row) != _prompt(replies[0])), None)
            if other is None:
                raise ConfigError(
                    f"The {counted(len(drawn), 'demonstration')} of a step have one prompt, and the loss reads replies "
                    "after the prompts of others.",
                    "Raise demonstrations.per_step, or mix rows of other prompts in.",
                )
            with_others += [*replies, *(self._after_prompt(other, reply) for reply in replies)]
        return with_others

    def _after_prompt(self, prompt: TrainingRow, reply: TrainingRow) -> TrainingRow:
        """The tokens of a row's reply after the prompt of another row."""
        end, begin = (int(row.mask.argmax()) for row in (prompt, reply))
        tokens = [*prompt.tokens[: end + 1].tolist(), *reply.targets[begin:].tolist()]
        return self._row(tokens, [False] * (end + 1) + reply.mask[begin:].tolist(), "mismatched")

    def _next(self) -> Demonstration:
        """The next demonstration. Sources are mixed in proportion to their sizes, in an order drawn for each epoch."""
        epoch, place = divmod(self.cursor, self.size)
        if self._epoch[0] != epoch:
            sizes = [len(source.demonstrations) for source in self._sources]
            order = np.repeat(np.arange(len(sizes)), sizes)
            if len(sizes) > 1:
                order = np.random.default_rng((self._seed, _SEED_STREAM, epoch)).permutation(order)
            self._epoch = (epoch, order)
        self.cursor += 1
        order = self._epoch[1]
        number = int(order[place])
        source = self._sources[number]
        draw = epoch * len(source.demonstrations) + int((order[:place] == number).sum())
        return source.demonstrations[source.row_order.pick(draw, ())]

    def _is_held_out(self, demonstration: Demonstration) -> bool:
        """Whether a turn to learn answers a held-out question. Plain text has no question."""
        if self._config.learn == "text":
            return False
        chats = [demonstration.messages, *([demonstration.rejected] if demonstration.rejected else [])]
        if self._config.learn == "all":
            chats += [chat[:end] for chat in chats for end, message in enumerate(chat) if message.role == "assistant"]
        return any(question_key(chat) in self._held_out_keys for chat in chats)

    def _rows(self, demonstration: Demonstration) -> list[TrainingRow]:
        """Training rows of a demonstration; empty if truncation leaves nothing to learn."""
        check_pair(demonstration, self._pairs, self._labels)
        kind: Kind = "chosen" if self._pairs else "expert"
        if demonstration.desirable is not None:
            kind = "desirable" if demonstration.desirable else "undesirable"
        rows = [self._row(*encoded, kind) for encoded in self._encode(demonstration, demonstration.messages)]
        if not self._pairs:
            return [row for row in rows if row.mask.any()]
        if demonstration.rejected:
            rows += [self._row(*encoded, "rejected") for encoded in self._encode(demonstration, demonstration.rejected)]
        if len(rows) > 1 + bool(demonstration.rejected):
            raise ConfigError(
                f"The chat template renders earlier replies of {demonstration.id} differently once others follow, so "
                "that a reply takes several training rows.",
                "Set demonstrations.learn to last.",
            )
        return rows if all(row.mask.any() for row in rows) else []

    def _encode(
        self, demonstration: Demonstration, messages: Sequence[Message]
    ) -> Sequence[tuple[list[int], list[bool]]]:
        """(tokens, loss mask) of each training row."""
        if self._verdict is not None:
            tokens = self._verdict.tokens(self._codec, messages)
            return [(tokens, [*[False] * (len(tokens) - 1), True])]
        if self._config.learn == "text":
            tokens = self._codec.encode_text(messages[-1].content)
            return [(tokens, [True] * len(tokens))]
        if self._config.learn == "all":
            return self._codec.encode_every_reply(messages, demonstration.tools)
        return [self._codec.encode_with_loss_mask(messages, demonstration.tools)]

    def _row(self, tokens: list[int], mask: list[bool], kind: Kind) -> TrainingRow:
        end = self._config.max_tokens or len(tokens)
        tokens, mask = tokens[:end], mask[:end]
        zeros = np.zeros(max(0, len(tokens) - 1), np.float32)
        return TrainingRow(
            tokens=np.array(tokens[:-1], np.int64),
            targets=np.array(tokens[1:], np.int64),
            logprobs=zeros,
            advantages=zeros,
            mask=np.array(mask[1:], bool),
            kind=kind,
        )


def _prompt(row: TrainingRow) -> bytes:
    """The tokens before a row's reply."""
    return row.tokens[: int(row.mask.argmax()) + 1].tobytes()


def check_pair(demonstration: Demonstration, pairs: bool, labels: bool = False) -> None:
    """Raise ConfigError unless the demonstration is a pair of replies exactly if `pairs`, or with `labels` has one."""
    labelled = demonstration.desirable is not None
    if labelled and not labels:
        raise ConfigError(
            f"{demonstration.id} is a reply with a label, which this algorithm does not read.",
            "Set algorithm.type to kto, or leave out label_key on demonstrations.data.",
        )
    if pairs and not demonstration.rejected and not labelled:
        lacking, fix = "rejected reply", "Set chosen and rejected on demonstrations.data"
        if labels:
            lacking, fix = f"{lacking} and no label", f"{fix}, or label_key"
        raise ConfigError(f"{demonstration.id} has no {lacking}.", f"{fix}.")
    if demonstration.rejected and not pairs:
        raise ConfigError(
            f"{demonstration.id} is a pair of replies, which this algorithm does not compare.",
            "Use an algorithm for pairs, such as dpo, or leave out chosen and rejected.",
        )
