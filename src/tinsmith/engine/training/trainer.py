"""The Trainer in plain torch: adapters of many models on one base, trained in packed passes.

A run goes: rows of all passes -> micro-batches of packed tokens -> hidden states (with a graph only where a gradient is
wanted) -> logprobs of every target -> each pass's loss and its gradient in the logprobs -> back through head and body
into each model's gradient. Gradients of a run count only when the whole run went well; if it did not, its
passes are run again one by one, so that one bad request fails alone. Between micro-batches the sampler has its turn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, PassResult
from tinsmith.engine.config import Recompute
from tinsmith.engine.custom_loss.runner import Program
from tinsmith.engine.device_sharing import DeviceScheduler
from tinsmith.engine.lora import adapter, linear, peft
from tinsmith.engine.lora.lm_head import Head, Slopes, Targets
from tinsmith.engine.model import attention, packing
from tinsmith.engine.model.loading import BaseModel
from tinsmith.engine.training import loss_specs, losses
from tinsmith.engine.training.activation_checkpointing import Switch
from tinsmith.engine.training.optimizer import Captured, Model
from tinsmith.errors import BadRequest, EngineError, NotFound, TinsmithError

_NOT_FINITE = "Check logprobs and advantages: the ratio exp(p - q) may have overflowed."
_DIVERGED = "Load a saved state, and train on from there with a lower learning_rate."


@dataclass(frozen=True, slots=True)
class _Item:
    """One datum of a run: which pass and place it comes from, and the slot of its model."""

    number: int
    place: int
    datum: Datum
    slot: int
    learning: np.ndarray
    """bool [N]: the positions that a gradient may come from."""

    @property
    def learns(self) -> bool:
        """Whether any may; a datum without runs without a graph."""
        return bool(self.learning.any())

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
            _Item(number, place, datum, slots[one.model_id], loss_specs.learning(one, datum))
            for number, one in enumerate(passes)
            for place, datum in enumerate(one.data)
        ]
        self.rows = [
            packing.Row(key=key, adapter=item.slot, tokens=item.datum.tokens) for key, item in enumerate(self.items)
        ]
        self._gathered = [model.gathering() for model in models] if self._any_learns() else []
        self.weights = [self._reading(slot) for slot in range(len(models))]
        spread = any(loss_specs.wants_entropy(one) for one in passes)
        self._logprobs = [_blank([datum.targets.shape for datum in one.data]) for one in passes]
        self._entropies = [_blank([datum.tokens.shape for datum in one.data] if spread else []) for one in passes]
        self._metrics: list[dict[str, float]] = [{"loss:sum": 0.0} for _ in passes]
        self._programs = {number: Program(one.graph) for number, one in enumerate(passes) if one.graph is not None}

    def targets(self, forest: packing.Forest, device: torch.device) -> tuple[Targets, Tensor]:
        """All targets of a micro-batch sorted by packed position, and where each of its rows' targets went."""
        at = np.concatenate([np.repeat(forest.index[key], self.items[key].repeats) for key in forest.index])
        ids = np.concatenate([self.items[key].datum.targets.reshape(-1) for key in forest.index])
        order = np.argsort(at, kind="stable")
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        sorted_targets = Targets(torch.as_tensor(at[order], device=device), torch.as_tensor(ids[order], device=device))
        return sorted_targets, torch.as_tensor(back, device=device)

    def learning(self, forest: packing.Forest, device: torch.device) -> Tensor:
        """bool [T]: the packed positions with a target that a gradient may come from."""
        found = np.zeros(len(forest.tokens), bool)
        for key, index in forest.index.items():
            item = self.items[key]
            found[index[item.learning]] = True
        return torch.as_tensor(found, device=device)

    def wants_entropy(self, forest: packing.Forest) -> bool:
        """Whether any of a micro-batch's passes does."""
        return any(loss_specs.wants_entropy(self._passes[self.items[key].number]) for key in forest.index)

    def score(self, forest: packing.Forest, logprobs: Tensor, entropies: Tensor | None) -> Slopes:
        """Keep the logprobs [M] and entropies [T] of a micro-batch, add up its losses; returns their slopes in both."""
        keys = list(forest.index)
        pieces = dict(zip(keys, logprobs.split([self.items[key].datum.targets.size for key in keys]), strict=True))
        slopes = dict.fromkeys(keys, torch.empty(0))
        steep = None if entropies is None else torch.zeros_like(entropies)
        for number in sorted({self.items[key].number for key in keys}):
            mine = [key for key in keys if self.items[key].number == number]
            at = torch.as_tensor(np.concatenate([forest.index[key] for key in mine]), device=logprobs.device)
            spread = entropies[at] if entropies is not None else None
            scored = torch.cat([pieces[key] for key in mine])
            if not bool(scored.isfinite().all()):  # a loss may leave them out; whoever shares the pass reads them too
                raise BadRequest("This model gives logprobs that are not finite: it has diverged.", _DIVERGED)
            found, by_entropy = self._loss(number, mine, scored, spread)
            slopes.update(zip(mine, found.split([pieces[key].numel() for key in mine]), strict=True))
            if steep is not None and by_entropy is not None:
                steep.index_add_(0, at, by_entropy)  # data that share a position add up
            if spread is not None:
                self._keep(self._entropies, mine, spread.split([len(forest.index[key]) for key in mine]))
        self._keep(self._logprobs, keys, [pieces[key] for key in keys])
        return Slopes(torch.cat([slopes[key] for key in keys]), steep)

    def finish(self) -> list[PassResult]:
        """The results; only now do the models have their gradients."""
        if not all(bool(torch.isfinite(one.flat.sum())) for one in self._gathered):
            raise BadRequest("The gradient of this request is not finite; it was discarded.", _NOT_FINITE)
        for model, gathered in zip(self._models, self._gathered, strict=False):
            model.take(gathered)
        return [
            PassResult(
                logprobs=tuple(self._logprobs[number]),
                metrics=_reduced(self._metrics[number], len(one.data)),
                entropies=tuple(self._entropies[number]) if one.loss_config.get("return_entropy") else None,
            )
            for number, one in enumerate(self._passes)
        ]

    def abandon(self) -> None:
        """Leave the models as they were before the run."""
        for model, gathered in zip(self._models, self._gathered, strict=False):
            model.refuse(gathered)

    def _loss(
        self, number: int, keys: Sequence[int], logprobs: Tensor, entropies: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One pass's share of a micro-batch: adds its loss and metrics, returns the slopes in both."""
        if number in self._programs:
            return self._custom(number, keys, logprobs), None
        one, data = self._passes[number], [self.items[key].datum for key in keys]
        leaf = logprobs.double().requires_grad_()
        spread = entropies.double().requires_grad_() if entropies is not None else None
        inputs = {
            name: torch.as_tensor(values, device=leaf.device).double() for name, values in _gathered(one, data).items()
        }
        sizes = [datum.targets.size for datum in data]
        sequence = torch.as_tensor(np.repeat(np.arange(len(data)), sizes), device=leaf.device)
        targets = losses.Targets(logprobs=leaf, entropies=spread, sequence=sequence, inputs=inputs)
        with torch.enable_grad():
            loss, metrics = losses.objective(
                one.loss_fn, targets, loss_specs.numbers(one), loss_specs.estimator(one), one.loss_config
            )
        leaves = [leaf] if spread is None else [leaf, spread]
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        _check_finite(one, loss, *slopes)
        self._add(number, {name: float(value.detach()) for name, value in {"loss:sum": loss, **metrics}.items()})
        return slopes[0].float(), slopes[1].float() if spread is not None else None

    def _custom(self, number: int, keys: Sequence[int], logprobs: Tensor) -> Tensor:
        """The same for an uploaded loss, datum by datum."""
        slopes = []
        for key, piece in zip(keys, logprobs.split([self.items[key].datum.targets.size for key in keys]), strict=True):
            datum = self.items[key].datum
            loss, slope, metrics = self._programs[number].run(piece.reshape(datum.targets.shape), datum.inputs)
            _check_finite(self._passes[number], torch.tensor(loss), slope)
            self._add(number, {"loss:sum": loss, **metrics})
            slopes.append(slope.reshape(-1).to(logprobs.device))
        return torch.cat(slopes)

    def _add(self, number: int, metrics: Mapping[str, float]) -> None:
        found = self._metrics[number]
        found.update({name: found.get(name, 0.0) + value for name, value in metrics.items()})

    def _keep(self, into: list[list[np.ndarray]], keys: Sequence[int], pieces: Sequence[Tensor]) -> None:
        for key, piece in zip(keys, pieces, strict=True):
            item = self.items[key]
            kept = into[item.number][item.place]
            kept[...] = piece.cpu().numpy().reshape(kept.shape)

    def _any_learns(self) -> bool:
        return any(item.learns for item in self.items)

    def _reading(self, slot: int) -> adapter.Weights:
        """A model's adapter, with this run's gradient buffer where one is wanted."""
        model = self._models[slot]
        reading = model.weights()
        if not self._gathered:
            return reading
        return adapter.Weights(reading.scale, reading.pairs, self._gathered[slot].pairs, reading.stacks)


def _blank(shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """An array of each shape, float32, all in one piece: thousands of small ones, made while a run goes on, would lie
    between activations and keep the memory of these from being used again."""
    ends = np.cumsum([math.prod(shape) for shape in shapes], dtype=np.int64)
    pieces = np.split(np.empty(ends[-1] if shapes else 0, np.float32), ends)[: len(shapes)]
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _gathered(one: Pass, data: Sequence[Datum]) -> dict[str, np.ndarray]:
    """Each input of all data, flat."""
    found = [loss_specs.filled(one, datum) for datum in data]
    return {name: np.concatenate([values[name] for values in found]) for name in found[0]}


def _reduced(metrics: Mapping[str, float], count: int) -> dict[str, float]:
    """Sums over all data, and means where the name says so."""
    return {name: value / count if name.endswith(":mean") else float(value) for name, value in metrics.items()}


def _check_finite(one: Pass, loss: Tensor, *slopes: Tensor) -> None:
    if not bool(torch.isfinite(loss)) or not all(bool(torch.isfinite(slope).all()) for slope in slopes):
        raise BadRequest(f"The {one.loss_fn} loss of this request is {float(loss.detach())}.", _NOT_FINITE)


BUDGETS = 2
"""A row of so many times the tokens of a micro-batch keeps its activations; a longer one computes them again."""


class TorchTrainer:
    """Implements `engine.base.Trainer`; `capture` is what the sampler takes."""

    def __init__(
        self,
        base: BaseModel,
        head: Head,
        router: linear.Router,
        scheduler: DeviceScheduler,
        pass_tokens: int,
        switch: Switch,
        recompute: Recompute,
    ) -> None:
        self._base, self._router, self._scheduler, self._pass_tokens = base, router, scheduler, pass_tokens
        self._switch, self._recompute = switch, recompute
        self._head = head
        self._models: dict[str, Model] = {}
        self._lock = asyncio.Lock()

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        self._models[model_id] = self._made(lora, None)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        async with self._lock:
            spec = peft.read_spec(source)
            moments = peft.read_moments(source) if optimizer else None
            model = self._made(spec, source)
            if moments is not None:
                model.restore(moments)
            self._models[model_id] = model

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        async with self._lock:  # in a thread: the sampler goes on, and nothing trains meanwhile
            model = self._model(model_id)
            moments = model.moments() if optimizer else None
            source = self._base.card.source
            return await asyncio.to_thread(peft.write, to, model.layout, model.master.detach(), source, moments)

    async def drop(self, model_id: str) -> None:
        async with self._lock:
            self._models.pop(model_id, None)

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        async with self._lock:
            return self._model(model_id).step(adam)

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        async with self._lock:
            return await self._run(passes)

    def capture(self, model_id: str) -> Captured:
        """The model's adapter of this moment."""
        return self._model(model_id).capture()

    def gradients(self, model_id: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Module name -> accumulated gradients of A and B: for those who check the mathematics."""
        model = self._model(model_id)
        return {
            name: (pair.a.cpu().numpy().copy(), pair.b.cpu().numpy().copy())
            for name, pair in model.layout.pairs(model.gradient).items()
        }

    def _model(self, model_id: str) -> Model:
        if model_id not in self._models:
            raise NotFound(f"The engine holds no model '{model_id}'.", "Create it, or load it from a saved state.")
        return self._models[model_id]

    def _made(self, spec: LoraSpec, source: Path | None) -> Model:
        layout = linear.layout_for(self._base, spec)
        flat = layout.initial() if source is None else peft.read(source, layout)
        return Model(layout, flat.to(self._base.device), self._base.dtype)

    async def _run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        try:
            return [*await self._together(passes)]
        except Exception as error:  # noqa: BLE001 - whatever it was, it is the fault of one pass and must stay with it
            if len(passes) > 1:
                return [(await self._run([one]))[0] for one in passes]
            return [error if isinstance(error, TinsmithError) else EngineError(f"The pass failed: {error!r}")]

    async def _together(self, passes: Sequence[Pass]) -> list[PassResult]:
        names = sorted({one.model_id for one in passes})
        models = [self._model(name) for name in names]
        work = Work(passes, names, models)
        try:
            for learns in (True, False):
                rows = [row for row in work.rows if work.items[row.key].learns is learns]
                for rows_of_batch in packing.micro_batches(rows, self._pass_tokens):
                    async with self._scheduler.turn("training"):
                        forest = packing.pack(rows_of_batch)
                        with torch.set_grad_enabled(learns), self._switch.set(self._recomputes(len(forest.tokens))):
                            self._micro_batch(work, forest)
            return work.finish()
        except BaseException:
            work.abandon()
            raise

    def _recomputes(self, tokens: int) -> bool:
        """Whether layers compute again what the backward needs: by choice, or because a row is beyond the budget."""
        return self._recompute == "always" or (self._recompute == "auto" and tokens > BUDGETS * self._pass_tokens)

    def _micro_batch(self, work: Work, forest: packing.Forest) -> None:
        device = self._base.device
        placed = adapter.place(forest.spans, work.weights)
        context = attention.packed(forest, self._base.dtype, device)
        with self._router.using(placed):
            hidden = self._base.hidden(
                torch.as_tensor(forest.tokens, device=device), torch.as_tensor(forest.positions, device=device), context
            )
        targets, order = work.targets(forest, device)
        learning = work.learning(forest, device) if torch.is_grad_enabled() else None
        scored = self._head.score(hidden.detach(), placed, targets, learning, entropies=work.wants_entropy(forest))
        slopes = work.score(forest, scored.logprobs[order], scored.entropies)
        if learning is not None:
            into = torch.empty_like(slopes.logprobs)
            into[order] = slopes.logprobs
            slopes = Slopes(into, slopes.entropies)
            back = self._head.backward(hidden.detach(), scored, targets, slopes)
            with self._router.using(placed):  # layers that compute again need it too
                hidden.backward(back)
