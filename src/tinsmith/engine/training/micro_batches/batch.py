"""A micro-batch: rows of runs, packed into one tree, their targets and losses, and the pieces that are computed.

A tree that fits is one piece. A larger one, always of one run, is cut (`packing.cut`): pieces are computed forward and
backward from the last to the first, and before each those positions that it sees. The loss of a row is added when the
piece that it ends in is computed: by then all its targets have a log-probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tinsmith import routed_experts
from tinsmith.engine.lora import adapter
from tinsmith.engine.lora.adapter import PlacedAdapter
from tinsmith.engine.lora.head.blocks import PackedTargets
from tinsmith.engine.lora.lm_head import ScoreGrads, TargetScores
from tinsmith.engine.model import packing
from tinsmith.engine.model.attention import PathKV, PieceKV
from tinsmith.engine.training.run_rows import RunItem
from tinsmith.engine.training.training_run import TrainingRun
from tinsmith.routed_experts import RouterShape

Part = tuple[TrainingRun, Sequence[packing.PackedRow]]
"""Rows of a run in a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPiece:
    """Positions of a micro-batch that are computed at once, and their targets."""

    tree: packing.PackedTree
    adapters: Sequence[PlacedAdapter]
    own: np.ndarray
    """int64 [P]: its positions among those of the micro-batch, rising."""
    numbers: np.ndarray
    """int64 [M]: its targets among those of the micro-batch."""
    targets: PackedTargets
    """The same targets, at positions of the piece."""
    grad_mask: np.ndarray | None
    """bool [P]: positions with a target that may have a gradient; None without a backward."""
    ends: Sequence[int]
    """Keys of the rows whose loss is added."""
    kv: PieceKV | None = None
    """Keys and values of positions before the piece; None if it is the whole tree."""


class MicroBatch:
    """Rows of runs, packed, with their adapters, targets and scores."""

    def __init__(self, parts: Sequence[Part], *, with_grad: bool) -> None:
        self.with_grad = with_grad
        rows = [(slot, run, row) for slot, (run, rows) in enumerate(parts) for row in rows]
        self._placed = [(slot, run, run.item(row.key)) for slot, run, row in rows]
        """Slot, run and datum of each row, by the row's key in `tree`."""
        self._weights = [run.weights for run, _ in parts]
        self.tree = packing.pack([replace(row, key=key, adapter=slot) for key, (slot, _, row) in enumerate(rows)])
        index = self.tree.index
        items = {key: self._placed[key][2] for key in index}
        at = np.concatenate([np.repeat(places, items[key].targets_per_position) for key, places in index.items()])
        ids = np.concatenate([item.datum.targets.reshape(-1) for item in items.values()])
        self._targets = PackedTargets(at, ids)
        """Each row's targets, row after row."""
        ends = np.cumsum([0, *(item.datum.targets.size for item in items.values())]).tolist()
        self._numbers = {key: slice(*ends[place : place + 2]) for place, key in enumerate(index)}
        """Each row's targets among all."""
        self._grad_mask = np.zeros(len(self.tree.tokens), bool)
        """Positions with a target that may have a gradient."""
        for key, places in index.items():
            self._grad_mask[places[items[key].grad_mask]] = True
        self.needs_entropy = any(run.state(item).needs_entropy for _, run, item in self._placed)
        self._logprobs, self._grads = (torch.zeros(len(at), device="cpu") for _ in range(2))
        """Of each target, on the host."""
        self._entropies, self._entropy_grads = (
            torch.zeros(len(self.tree.tokens), device="cpu") if self.needs_entropy else None for _ in range(2)
        )
        """Of each position, on the host."""

    @property
    def is_over(self) -> bool:
        """Whether every run has failed."""
        return all(run.error is not None for _, run, _ in self._placed)

    def pieces(self, budget: int | None) -> Iterator[ScoredPiece]:
        """The pieces in the order in which they are computed, of at most `budget` positions; None: the whole tree."""
        cut = None if budget is None or self.tree.images else packing.cut(self.tree, budget)
        if cut is None:
            yield self._piece(packing.Piece(tree=self.tree, own=np.arange(len(self.tree.tokens))))
            return
        saved = PathKV(max(piece.past for piece in cut))
        is_scored = np.zeros(len(self.tree.tokens), bool)
        for piece in cut:
            yield self._piece(piece, PieceKV(saved, piece), is_scored)
            is_scored[piece.own] = True

    def _piece(
        self, piece: packing.Piece, kv: PieceKV | None = None, is_scored: np.ndarray | None = None
    ) -> ScoredPiece:
        """Positions of `is_scored` have scores already: only targets that may have a gradient are scored again."""
        places = np.full(len(self.tree.tokens), -1)
        places[piece.own] = np.arange(len(piece.own))
        wanted = places[self._targets.at] >= 0
        if is_scored is not None:
            wanted &= (self._grad_mask | ~is_scored)[self._targets.at]
        numbers = np.flatnonzero(wanted)
        ends = [key for key, index in self.tree.index.items() if not piece.saves and places[index[-1]] >= 0]
        return ScoredPiece(
            tree=piece.tree,
            adapters=adapter.place_adapters(piece.tree.spans, self._weights),
            own=piece.own,
            numbers=numbers,
            targets=PackedTargets(places[self._targets.at[numbers]], self._targets.ids[numbers]),
            grad_mask=self._grad_mask[piece.own] if self.with_grad and not piece.saves else None,
            ends=ends,
            kv=kv,
        )

    def recorded_experts(self, router: RouterShape) -> np.ndarray | None:
        """The record [T, layers, k] that the pass replays; None if it replays nothing."""
        replayed = {key: item.replayed for key, (_, _, item) in enumerate(self._placed) if item.replayed is not None}
        if not replayed:
            return None
        record = router.empty(len(self.tree.tokens))
        for key, rows in replayed.items():
            record[self.tree.index[key]] = rows
        return record

    @property
    def compares_experts(self) -> bool:
        """Whether any datum has a record, which the result compares with the routers' own choices."""
        return any(item.recorded is not None for _, _, item in self._placed)

    def compare_experts(self, own: np.ndarray) -> None:
        """Add to each pass how often the routers' own choices [T, layers, k] differ from its records."""
        for key, (_, run, item) in enumerate(self._placed):
            if item.recorded is not None:
                share = routed_experts.share_that_differs(own[self.tree.index[key]], item.recorded)
                run.state(item).add_metrics({"expert_mismatch:mean": share})

    def losses(self, piece: ScoredPiece, scores: TargetScores) -> ScoreGrads:
        """Store the scores of a piece, add the losses of the rows that end in it, and return the gradients of its
        targets, in the order of `scores`.

        Losses are computed on the host, which needs the scores anyway: a GPU is waited for once, and gets the gradients
        in one copy. A run whose loss fails gets its error and no gradient; the others go on.
        """
        logprobs, entropies = on_host(scores)
        numbers, own = torch.from_numpy(piece.numbers), torch.from_numpy(piece.own)
        self._logprobs[numbers] = logprobs
        if self._entropies is not None and entropies is not None:
            scored = torch.from_numpy(np.unique(piece.targets.at))
            self._entropies[own[scored]] = entropies[scored]
        by_pass: dict[tuple[int, int], list[int]] = {}
        for key in piece.ends:
            slot, _, item = self._placed[key]
            by_pass.setdefault((slot, item.pass_index), []).append(key)
        for _, keys in sorted(by_pass.items()):
            run = self._placed[keys[0]][1]
            try:
                self._add_losses(run, keys)
            except Exception as error:  # noqa: BLE001 - any error of a pass is its run's
                run.error = error
        of_entropies = None if self._entropy_grads is None else self._entropy_grads[own]
        return on_device(ScoreGrads(self._grads[numbers], of_entropies), scores.logprobs.device)

    def _add_losses(self, run: TrainingRun, keys: Sequence[int]) -> None:
        """Add the losses of a pass's rows and keep their gradients."""
        items: list[RunItem] = [self._placed[key][2] for key in keys]
        at = torch.from_numpy(np.concatenate([self.tree.index[key] for key in keys]))
        grad, grad_of_entropy = run.state(items[0]).add(
            items,
            torch.cat([self._logprobs[self._numbers[key]] for key in keys]),
            None if self._entropies is None else self._entropies[at],
        )
        for key, of_row in zip(keys, grad.split([item.datum.targets.size for item in items]), strict=True):
            self._grads[self._numbers[key]] = of_row
        if self._entropy_grads is not None and grad_of_entropy is not None:
            self._entropy_grads.index_add_(0, at, grad_of_entropy)  # data that share a position add up


def on_host(scores: TargetScores) -> tuple[Tensor, Tensor | None]:
    """The logprobs and entropies on the host, in one copy."""
    if scores.entropies is None:
        return scores.logprobs.cpu(), None
    if scores.logprobs.device.type == "cpu":
        return scores.logprobs, scores.entropies
    joined = torch.cat([scores.logprobs, scores.entropies]).cpu()
    return joined[: len(scores.logprobs)], joined[len(scores.logprobs) :]


def on_device(grads: ScoreGrads, device: torch.device) -> ScoreGrads:
    """The gradients on the device, in one copy."""
    if device.type == "cpu":
        return grads
    if grads.entropies is None:
        return ScoreGrads(grads.logprobs.to(device))
    joined = torch.cat([grads.logprobs, grads.entropies]).to(device)
    return ScoreGrads(joined[: len(grads.logprobs)], joined[len(grads.logprobs) :])
