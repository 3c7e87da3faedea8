"""A round's draws: from hidden states to each answer's next token, and whether that ends it.

What goes wrong with one answer is its request's fault alone: it comes back beside the request, and the others are
drawn. So do numbers that are not finite, as weights that have diverged give them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from tinsmith.engine import choice, stops
from tinsmith.engine.asks import Answer, Ask, Faults
from tinsmith.engine.head import Head
from tinsmith.engine.lora import Placed, Weights
from tinsmith.errors import BadRequest, EngineError, TinsmithError


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws with a head, and reads with a tokenizer."""

    head: Head
    tokenizer: Any

    def firsts(self, asks: Sequence[Ask], last: Tensor) -> Faults:
        """The first token of all answers; `last` [A, D] are the last hidden states of the prompts."""
        faults: Faults = {}
        for block in self.head.blocks(last, placed([ask.weights for ask in asks])):
            here = asks[block.first : block.first + len(block.logits)]
            faults |= self._draw([ask.answers for ask in here], block.logits)
        return faults

    def nexts(self, answers: Sequence[Answer], hidden: Tensor, where: Sequence[Placed]) -> Faults:
        """One more token of each; `hidden` [B, D] are theirs."""
        faults: Faults = {}
        for block in self.head.blocks(hidden, where):
            here = answers[block.first : block.first + len(block.logits)]
            faults |= self._draw([[answer] for answer in here], block.logits)
        return faults

    def _draw(self, groups: Sequence[Sequence[Answer]], logits: Tensor) -> Faults:
        """A token for each answer, from the row of logits that its group shares."""
        answers = [answer for group in groups for answer in group]
        chosen = choice.choose(
            logits,
            [group[0].ask.rule for group in groups],
            [answer.numbers.random() for answer in answers],
            [row for row, group in enumerate(groups) for _ in group],
        )
        drawn = zip(answers, chosen.tokens.tolist(), chosen.logprobs.tolist(), chosen.tops, strict=True)
        faults: Faults = {}
        for answer, token, logprob, top in drawn:
            try:
                if not math.isfinite(logprob):
                    raise not_finite(answer.ask)
                if top is not None:
                    answer.tops.append(top)
                answer.add(token, logprob, self._completes_stop(answer, token))
            except Exception as error:  # noqa: BLE001 - whatever it was, it is the fault of one request
                faults[answer.ask] = error
        return faults

    def _completes_stop(self, answer: Answer, token: int) -> bool:
        asked = answer.ask.request
        return stops.completes(self.tokenizer, asked.stop_strings, asked.prompt, answer.tokens, token)


def not_finite(ask: Ask) -> TinsmithError:
    """What a request is told whose numbers are no numbers."""
    if ask.weights is None:
        return EngineError("The base model gives numbers that are not finite for this prompt.", "Serve it in float32.")
    return BadRequest(
        "The weights that this request samples from give numbers that are not finite: they have diverged.",
        "Sample from an earlier checkpoint, and train on from there with a lower learning_rate.",
    )


def placed(weights: Sequence[Weights | None]) -> list[Placed]:
    """Where each adapter stands in a batch of one position per entry, equal ones side by side."""
    found, at = [], 0
    for _, same in groupby(weights, key=id):
        members = list(same)
        if members[0] is not None:
            found.append((members[0], at, at + len(members)))
        at += len(members)
    return found
