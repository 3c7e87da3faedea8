"""Decoding over pages, in which the host reads results a step later: while the device computes the next one.

A token goes from one step to the next on the device. A sequence that ends with a token (a stop token, a stop string)
is therefore in one more step, whose token is cut; one that ends by its length is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.lora.adapter import AdapterWeights, adapter_spans
from tinsmith.engine.lora.linear import ActiveAdapters
from tinsmith.engine.lora.lm_head import LMHead
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.sampling.device_sampling import DrawKind, rule_columns, sampled_tokens
from tinsmith.engine.sampling.paged.attention import AttendPages, table_of
from tinsmith.engine.sampling.paged.pages import PagedCache, PagedRow
from tinsmith.engine.sampling.paged.step import COLUMNS, Capture, Column, DecodeStep, StepShape
from tinsmith.engine.sampling.sequences import Sequence
from tinsmith.engine.sampling.token_sampling import SampledTokens, SamplingRule

PADDING = SamplingRule(1.0, -1, 1.0)
"""Rule of rows without a sequence."""


@dataclass(frozen=True, slots=True)
class DecodedTokens:
    """Results of a step for the sequences that are still there."""

    sequences: list[Sequence]
    sampled: SampledTokens


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the device computes; row b is of sequence b."""

    sequences: list[Sequence]
    rows: list[PagedRow]
    drawn: Tensor
    """On the host, once `done`."""
    done: Any
    """The event after the copy to the host, on CUDA devices."""
    experts: np.ndarray | None
    """The record [B, layers, k] of the fed tokens' experts, if some request records them."""

    def has(self, number: int) -> bool:
        """Whether the sequence of a row is still running there."""
        return self.sequences[number].row is self.rows[number]


class PagedDecoder:
    """Launches steps and collects their results."""

    def __init__(
        self,
        base: BaseModel,
        head: LMHead,
        active: ActiveAdapters,
        cache: PagedCache,
        attend_pages: AttendPages,
        capture: Capture | None,
        *,
        has_slots: bool = True,
    ) -> None:
        """Without slots, adapters are computed as in a prefill: what else was sampled before changes no product."""
        self._has_slots = has_slots
        self._base, self._cache, self._vocabulary = base, cache, base.head.shape[0]
        self._step = DecodeStep(base, head, active, cache, attend_pages, capture)
        self._launched: _Launched | None = None

    @property
    def tokens(self) -> int:
        """Cache tokens that the memory of graphs and adapters is worth."""
        return -(-self._step.bytes // self._cache.shape.token_bytes)

    def in_flight(self) -> set[Sequence]:
        """The sequences whose next token is being computed."""
        launched = self._launched
        if launched is None:
            return set()
        return {sequence for number, sequence in enumerate(launched.sequences) if launched.has(number)}

    def next(self, sequences: list[Sequence]) -> DecodedTokens | None:
        """Launch a step of these sequences, each of which has space for a token, then wait for the step before it and
        return its results. Without sequences nothing is launched."""
        before = self._launched
        self._launched = self._launch(sequences, before) if sequences else None
        return None if before is None else self._results(before)

    def finish(self) -> DecodedTokens | None:
        """Wait for the step that was launched last, if any."""
        return self.next([])

    def release_memory(self) -> None:
        """Drop what can be made again."""
        self._step.release_memory()

    def _launch(self, sequences: list[Sequence], before: _Launched | None) -> _Launched:
        sequences = sorted(sequences, key=lambda sequence: id(sequence.job.weights))
        rows = [sequence.row for sequence in sequences if isinstance(sequence.row, PagedRow)]
        rules = [sequence.job.rule for sequence in sequences]
        records = any(sequence.job.request.routed_experts for sequence in sequences)
        adapters = list(dict.fromkeys(sequence.job.weights for sequence in sequences))
        in_slots = [weights for weights in adapters if weights is not None]
        slots = None if records or not self._has_slots else self._step.slots.place(in_slots)
        spans = adapter_spans([sequence.job.weights for sequence in sequences]) if slots is None else None
        shape = StepShape.of(
            len(sequences),
            max(len(row.pages) for row in rows),
            DrawKind.of(rules),
            self._vocabulary,
            has_adapters=bool(in_slots) and spans is None,
        )
        slot_of = dict(zip(in_slots, slots or [-1] * len(in_slots), strict=True))
        control = self._control(shape, sequences, rules, slot_of, before)
        experts = None
        with self._base.routing.using(record=records):
            drawn = self._step.launch(shape, control, table_of(rows, shape.rows, shape.pages), spans)[: len(sequences)]
            if records:
                experts = self._base.routing.record()
        for row in rows:
            row.length += 1
        host, done = _to_host(drawn)
        return _Launched(sequences, rows, host, done, experts)

    def _control(
        self,
        shape: StepShape,
        sequences: list[Sequence],
        rules: list[SamplingRule],
        slot_of: dict[AdapterWeights, int],
        before: _Launched | None,
    ) -> np.ndarray:
        """What the step reads of its rows: float64 [COLUMNS, rows]."""
        source = {id(other): number for number, other in enumerate(before.sequences)} if before else {}
        control = np.zeros((COLUMNS, shape.rows))
        control[Column.SOURCE] = control[Column.SLOT] = -1
        control[len(Column) :] = rule_columns([*rules, *[PADDING] * (shape.rows - len(rules))])
        for number, sequence in enumerate(sequences):
            fed = source.get(id(sequence), -1)
            if fed >= 0 and before is not None and before.has(fed):
                control[Column.SOURCE, number] = fed
            else:
                control[Column.TOKEN, number] = sequence.tokens[-1]
            assert sequence.row is not None
            control[Column.POSITION, number] = sequence.position
            control[Column.PAST, number] = sequence.row.length
            control[Column.GOAL, number] = sequence.uniforms.random()
            if sequence.job.weights is not None:
                control[Column.SLOT, number] = slot_of[sequence.job.weights]
        return control

    def _results(self, launched: _Launched) -> DecodedTokens:
        if launched.done is not None:
            launched.done.synchronize()
        numbers = [number for number in range(len(launched.sequences)) if launched.has(number)]
        sequences = [launched.sequences[number] for number in numbers]
        drawn = launched.drawn.cpu().numpy()[numbers]
        if launched.experts is not None:
            for number, sequence in zip(numbers, sequences, strict=True):
                if sequence.job.request.routed_experts:
                    sequence.routed_experts.append(launched.experts[number])
        return DecodedTokens(sequences, sampled_tokens(drawn, [sequence.job.rule for sequence in sequences]))


def _to_host(drawn: Tensor) -> tuple[Tensor, Any]:
    """A copy of the results, and the event that says when it is complete."""
    if drawn.device.type != "cuda":
        return drawn.clone(), None
    host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
    host.copy_(drawn, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return host, done
