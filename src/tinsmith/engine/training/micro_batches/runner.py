"""Computes micro-batches on the base model: forward, score, losses and backward of their pieces.

On a CPU several are computed at the same time, in threads: forward and backward of the body each on its share of the
cores. Between them, scores and losses of one after the other come on all cores: these are few large operators, and the
precision that the head's product takes is PyTorch's for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.lora import linear
from tinsmith.engine.lora.lm_head import LMHead
from tinsmith.engine.model import packing
from tinsmith.engine.model.attention import PackedAttention
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.threads.compute import ComputeThreads, threads_for
from tinsmith.engine.training.activation_checkpointing import CheckpointSwitch
from tinsmith.engine.training.micro_batches.batch import MicroBatch, Part, ScoredPiece
from tinsmith.engine.training.training_run import TrainingRun
from tinsmith.engine_options import Recompute


class RunningMicroBatch:
    """A micro-batch and what is left to compute of it."""

    def __init__(self, runs: Sequence[TrainingRun], pieces: Iterator[tuple[MicroBatch, ScoredPiece]]) -> None:
        self.runs = runs
        self.error: Exception | None = None
        """Why it failed."""
        self.is_done = False
        self._pieces = pieces
        self.batch: MicroBatch
        """The packed rows."""
        self.piece: ScoredPiece
        """The piece to compute next."""
        self.hidden: Tensor | None = None
        """float [P, D]: hidden states of the piece, with their graph."""
        self.hidden_grad: Tensor | None = None
        """d loss / d hidden."""
        self.attempt(self.take_piece)

    def take_piece(self) -> None:
        """Go on to the next piece; there is none if every run has failed."""
        self.hidden = self.hidden_grad = None
        taken = next(self._pieces, None)
        if taken is None:
            self.is_done = True
        else:
            self.batch, self.piece = taken

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a step unless it is done or one before has failed; an error is kept."""
        if self.is_done:
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 - any error is that of the runs
            self.error, self.is_done = error, True
            self.hidden = self.hidden_grad = None


class MicroBatchRunner:
    """Computes micro-batches of up to `tokens` packed tokens, `threads.at_once` of them at the same time."""

    def __init__(
        self,
        base: BaseModel,
        head: LMHead,
        active: linear.ActiveAdapters,
        switch: CheckpointSwitch,
        recompute: Recompute,
        tokens: int,
        threads: ComputeThreads,
        *,
        cuts: bool,
    ) -> None:
        """`cuts`: whether a run's larger micro-batches are computed in pieces."""
        self.tokens, self.cuts = tokens, cuts
        self._base, self._head, self._active = base, head, active
        self._parameters = base.card.weight_bytes // base.dtype.itemsize
        self._switch, self._recompute, self._threads = switch, recompute, threads

    @property
    def at_once(self) -> int:
        """Micro-batches that are computed at the same time."""
        return self._threads.at_once

    def start(self, parts: Sequence[Part], with_grad: bool) -> RunningMicroBatch:
        """A micro-batch of rows of runs, with or without a gradient."""
        cuts = self.cuts and with_grad and len(parts) == 1
        tokens = parts[0][0].budget or self.tokens if cuts else None
        return RunningMicroBatch([run for run, _ in parts], _pieces(parts, tokens, with_grad=with_grad))

    def advance(self, running: Sequence[RunningMicroBatch]) -> None:
        """Compute the next piece of each of up to `at_once` micro-batches."""
        positions = sum(len(each.piece.own) for each in running if not each.is_done)
        with threads_for(positions * self._parameters):
            self._threads.run([partial(each.attempt, partial(self._forward, each)) for each in running])
            for each in running:
                each.attempt(partial(self._score, each))
            self._threads.run([partial(each.attempt, partial(self._backward, each)) for each in running])
        for each in running:
            each.attempt(each.take_piece)

    def compute_nothing(self, with_grad: bool) -> None:
        """Forward and backward of a token under no adapter, for other ranks' sake."""
        row = packing.PackedRow(key=0, adapter=0, tokens=np.zeros(1, np.int32))
        with torch.set_grad_enabled(with_grad):
            hidden = self._base.hidden_of(packing.pack([row]))
            if with_grad:
                hidden.backward(torch.zeros_like(hidden))

    def _forward(self, running: RunningMicroBatch) -> None:
        batch, piece = running.batch, running.piece
        with self._computing(running), torch.set_grad_enabled(piece.grad_mask is not None):
            context = None
            if piece.kv is not None:
                base = self._base
                context = PackedAttention(
                    piece.tree, base.dtype, base.device, before=piece.kv, compiled=base.compiled_attention
                )
            running.hidden = self._base.hidden_of(piece.tree, context=context)
            if batch.compares_experts:
                batch.compare_experts(self._base.routing.record())

    def _score(self, running: RunningMicroBatch) -> None:
        """Scores and losses of a piece, and the gradient of its hidden states."""
        batch, piece = running.batch, running.piece
        assert running.hidden is not None
        hidden = running.hidden.detach()
        scores = self._head.score(hidden, piece.adapters, piece.targets, piece.grad_mask, entropies=batch.needs_entropy)
        grads = batch.losses(piece, scores)
        if piece.grad_mask is not None:
            running.hidden_grad = self._head.backward(hidden, scores, grads)

    def _backward(self, running: RunningMicroBatch) -> None:
        if running.hidden is None or running.hidden_grad is None:
            return
        recomputes = self._recomputes(len(running.piece.own))
        with self._computing(running) if recomputes else nullcontext():  # only then layers compute again
            running.hidden.backward(running.hidden_grad)

    @contextmanager
    def _computing(self, running: RunningMicroBatch) -> Iterator[None]:
        """Context of layers that compute a piece in the current thread."""
        piece, routing = running.piece, self._routing(running.batch)
        with self._switch.set(self._recomputes(len(piece.own))), self._active.using(piece.adapters), routing:
            yield

    def _routing(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Replay the experts that a micro-batch has on record, and record the routers' own choices beside them."""
        routing = self._base.routing
        if routing.shape is None or not batch.compares_experts:
            return nullcontext()
        recorded = batch.recorded_experts(routing.shape)
        replayed = None if recorded is None else routing.replay_of(recorded, self._base.device)
        return routing.using(replayed, record=True)

    def _recomputes(self, tokens: int) -> bool:
        """Whether layers recompute their activations in the backward of a micro-batch of this many tokens."""
        too_long = tokens > packing.LONG_ROW * self.tokens
        return self._recompute == "always" or (self._recompute == "auto" and too_long)


def _pieces(parts: Sequence[Part], tokens: int | None, *, with_grad: bool) -> Iterator[tuple[MicroBatch, ScoredPiece]]:
    """The micro-batch of some rows, packed when the first is taken, with each of its pieces of up to `tokens` positions
    (None: one of all), until every run has failed."""
    batch = MicroBatch(parts, with_grad=with_grad)
    for piece in batch.pieces(tokens):
        if batch.is_over:
            return
        yield batch, piece
