"""The data of one training run on its way: in as passes, through as packed rows, out as results.

A run is what `Trainer.run` was given: passes of any models. Here is what belongs to which pass: the targets of a packed
micro-batch, the loss of each pass over its share of it, and the logprobs and losses that come back. Gradients gather
in buffers of the run's own, so that models change only when the whole run went well. Left out: the model's forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine import batch, lora
from tinsmith.engine.base import Datum, Pass, PassResult
from tinsmith.engine.checks import LOSSES
from tinsmith.engine.head import Targets
from tinsmith.engine.live import Model
from tinsmith.engine.losses import LOSS_FUNCTIONS
from tinsmith.errors import BadRequest

_NOT_FINITE = "Check logprobs and advantages: the ratio exp(p - q) may have overflowed."


@dataclass(frozen=True, slots=True)
class _Item:
    """One datum of a run: which pass and place it comes from, and the slot of its model."""

    number: int
    place: int
    datum: Datum
    slot: int
    learns: bool

    @property
    def repeats(self) -> int:
        """Targets per position."""
        return self.datum.targets.size // len(self.datum.tokens)


class Work:
    """What a run has to do and what it has found out: the passes' data as rows; logprobs, losses and gradients."""

    def __init__(self, passes: Sequence[Pass], names: Sequence[str], models: Sequence[Model]) -> None:
        self._passes, self._models = passes, models
        slots = {name: slot for slot, name in enumerate(names)}
        self.items = [
            _Item(number, place, datum, slots[one.model_id], _learns(one, datum))
            for number, one in enumerate(passes)
            for place, datum in enumerate(one.data)
        ]
        self.rows = [
            batch.Row(key=key, adapter=item.slot, tokens=item.datum.tokens) for key, item in enumerate(self.items)
        ]
        self._pending = [torch.zeros_like(model.gradient) for model in models] if self._any_learns() else []
        self.weights = [self._reading(slot) for slot in range(len(models))]
        self._logprobs: list[list[np.ndarray]] = [[np.empty(0)] * len(one.data) for one in passes]
        self._losses = [0.0] * len(passes)

    def targets(self, forest: batch.Forest, device: torch.device) -> tuple[Targets, Tensor]:
        """All targets of a micro-batch sorted by packed position, and where each of its rows' targets went."""
        at = np.concatenate([np.repeat(forest.index[key], self.items[key].repeats) for key in forest.index])
        ids = np.concatenate([self.items[key].datum.targets.reshape(-1) for key in forest.index])
        order = np.argsort(at, kind="stable")
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        sorted_targets = Targets(torch.as_tensor(at[order], device=device), torch.as_tensor(ids[order], device=device))
        return sorted_targets, torch.as_tensor(back, device=device)

    def learning(self, forest: batch.Forest, device: torch.device) -> Tensor:
        """bool [T]: the packed positions with a target that a gradient may come from."""
        found = np.zeros(len(forest.tokens), bool)
        for key, index in forest.index.items():
            item = self.items[key]
            sure = _sure_input(self._passes[item.number], item.datum)
            found[index[np.full(len(index), True) if sure is None else sure.reshape(len(index), -1).any(axis=1)]] = True
        return torch.as_tensor(found, device=device)

    def score(self, forest: batch.Forest, logprobs: Tensor) -> Tensor:
        """Keep the logprobs [M] of a micro-batch, add up its losses; returns d loss / d logprob [M], zero without."""
        keys = list(forest.index)
        sizes = [self.items[key].datum.targets.size for key in keys]
        pieces = dict(zip(keys, logprobs.split(sizes), strict=True))
        slopes = dict.fromkeys(keys, torch.empty(0))
        for number in sorted({self.items[key].number for key in keys}):
            mine = [key for key in keys if self.items[key].number == number]
            for key, slope in zip(mine, self._loss(number, mine, [pieces[key] for key in mine]), strict=True):
                slopes[key] = slope
        for key, piece in pieces.items():
            item = self.items[key]
            self._logprobs[item.number][item.place] = piece.cpu().numpy().reshape(item.datum.targets.shape)
        return torch.cat([slopes[key] for key in keys])

    def finish(self) -> list[PassResult]:
        """The results; only now do the models' gradients change."""
        if not all(bool(torch.isfinite(pending.sum())) for pending in self._pending):
            raise BadRequest("The gradient of this request is not finite; it was discarded.", _NOT_FINITE)
        for model, pending in zip(self._models, self._pending, strict=False):
            model.gradient.add_(pending)
        return [
            PassResult(logprobs=tuple(found), metrics={"loss:sum": loss})
            for found, loss in zip(self._logprobs, self._losses, strict=True)
        ]

    def _loss(self, number: int, keys: Sequence[int], pieces: Sequence[Tensor]) -> Iterable[Tensor]:
        """One pass's share of a micro-batch, in float64: adds its loss, returns the gradient for each datum."""
        one = self._passes[number]
        leaf = torch.cat(list(pieces)).double().requires_grad_()
        data = [self.items[key].datum for key in keys]
        sizes = [datum.targets.size for datum in data]
        config = {**LOSSES[one.loss_fn].config, **one.loss_config}
        inputs = {
            name: torch.as_tensor(_gathered(name, data, config), dtype=leaf.dtype, device=leaf.device)
            for name in {name for datum in data for name in datum.inputs}
        }
        sequence = torch.repeat_interleave(torch.arange(len(data)), torch.tensor(sizes)).to(leaf.device)
        with torch.enable_grad():
            loss = LOSS_FUNCTIONS[one.loss_fn](leaf, inputs, sequence, config)
        (slope,) = torch.autograd.grad(loss, leaf)
        if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(slope).all()):
            raise BadRequest(f"The {one.loss_fn} loss of this request is {float(loss.detach())}.", _NOT_FINITE)
        self._losses[number] += float(loss.detach())
        return slope.float().split(sizes)

    def _any_learns(self) -> bool:
        return any(item.learns for item in self.items)

    def _reading(self, slot: int) -> lora.Weights:
        """A model's adapter, with this run's gradient buffer where one is wanted."""
        model = self._models[slot]
        reading = model.weights()
        if not self._pending:
            return reading
        return lora.Weights(reading.scale, reading.pairs, model.layout.pairs(self._pending[slot]))


def _gathered(name: str, data: Sequence[Datum], config: Mapping[str, float]) -> np.ndarray:
    """One input of all data, flat; where a datum leaves an optional one out, its default: a clip, or a weight of 1."""
    default = config.get(name, 1.0)
    return np.concatenate(
        [
            datum.inputs[name].reshape(-1) if name in datum.inputs else np.full(datum.targets.size, default)
            for datum in data
        ]
    )


def _learns(one: Pass, datum: Datum) -> bool:
    """Whether any gradient can come from this datum; without one it runs without a graph."""
    if one.forward_only:
        return False
    sure = _sure_input(one, datum)
    return sure is None or bool(np.any(sure))


def _sure_input(one: Pass, datum: Datum) -> np.ndarray | None:
    """The input without which a target has no gradient for sure: its weight or advantage. None: all may have one."""
    if one.loss_fn == "dro":
        return None
    return datum.inputs.get("weights" if one.loss_fn == "cross_entropy" else "advantages")
