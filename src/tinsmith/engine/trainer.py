"""The Trainer in plain torch: adapters of many models on one base, trained in packed passes.

A run goes: rows of all passes -> micro-batches of packed tokens -> hidden states (with a graph only where a gradient is
wanted) -> logprobs of every target -> each pass's loss and its gradient in the logprobs -> back through head and body
into each model's gradient. Gradients of a run reach a model only when the whole run went well; if it did not, its
passes are run again one by one, so that one bad request fails alone. Between micro-batches the sampler has its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine import adapters, attention, batch, lora
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, PassResult
from tinsmith.engine.checks import LOSSES
from tinsmith.engine.head import Head, Targets
from tinsmith.engine.losses import LOSS_FUNCTIONS
from tinsmith.engine.models import BaseModel
from tinsmith.engine.turns import Turns
from tinsmith.errors import BadRequest, EngineError, NotFound, TinsmithError


class Model:
    """An adapter in training: its float32 master, accumulated gradient and AdamW state, all flat."""

    def __init__(self, layout: lora.Layout, master: Tensor, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self.master = torch.nn.Parameter(master)
        self.gradient = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW([self.master], fused=True)
        self._weights: lora.Weights | None = None

    def weights(self) -> lora.Weights:
        """The adapter as of the last step; made anew only after a step."""
        if self._weights is None:
            self._weights = lora.weights_of(self.layout, self.master.detach(), self.dtype)
        return self._weights

    def step(self, adam: AdamParams) -> dict[str, float]:
        """AdamW with decoupled decay, then a clean gradient. Returns the gradient's norm before clipping."""
        self.master.grad = self.gradient
        norm = torch.nn.utils.get_total_norm([self.gradient])
        if adam.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_([self.master], adam.grad_clip_norm, norm)
        self.optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        self.optimizer.step()
        self.gradient.zero_()
        self._weights = None
        return {"grad_norm": float(norm)}

    def moments(self) -> adapters.Moments:
        """AdamW's state, zeros before the first step."""
        state = self.optimizer.state.get(self.master, {})
        if not state:
            return adapters.Moments(torch.zeros_like(self.gradient), torch.zeros_like(self.gradient), 0)
        return adapters.Moments(state["exp_avg"], state["exp_avg_sq"], int(state["step"]))

    def restore(self, moments: adapters.Moments) -> None:
        """Go on from saved moments."""
        self.optimizer.state[self.master] = {
            "step": torch.tensor(float(moments.steps), device=self.master.device),
            "exp_avg": moments.average.to(self.master.device),
            "exp_avg_sq": moments.square.to(self.master.device),
        }


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


class TorchTrainer:
    """Implements `engine.base.Trainer`; `snapshot` is what the sampler takes."""

    def __init__(self, base: BaseModel, router: lora.Router, turns: Turns, pass_tokens: int) -> None:
        self._base, self._router, self._turns, self._pass_tokens = base, router, turns, pass_tokens
        self._head = Head(base.head)
        self._models: dict[str, Model] = {}
        self._lock = asyncio.Lock()

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        self._add(model_id, lora, None)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        async with self._lock:
            spec = adapters.read_spec(source)
            moments = adapters.read_moments(source) if optimizer else None
            model = self._add(model_id, spec, source)
            if moments is not None:
                model.restore(moments)

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        model = self._model(model_id)
        moments = model.moments() if optimizer else None
        return adapters.write(to, model.layout, model.master.detach(), self._base.card.source, moments)

    async def drop(self, model_id: str) -> None:
        async with self._lock:
            self._models.pop(model_id, None)

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        async with self._lock:
            return self._model(model_id).step(adam)

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        async with self._lock:
            return await self._run(passes)

    def snapshot(self, model_id: str) -> tuple[lora.Layout, Tensor]:
        """The layout and a copy of the float32 master of this moment."""
        model = self._model(model_id)
        return model.layout, model.master.detach().clone()

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

    def _add(self, model_id: str, spec: LoraSpec, source: Path | None) -> Model:
        layout = lora.layout_for(self._base, spec)
        flat = layout.initial() if source is None else adapters.read(source, layout)
        self._models[model_id] = Model(layout, flat.to(self._base.device), self._base.dtype)
        return self._models[model_id]

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
        work = _Work(passes, names, models)
        for learns in (True, False):
            rows = [row for row in work.rows if work.items[row.key].learns is learns]
            for rows_of_batch in batch.micro_batches(rows, self._pass_tokens):
                async with self._turns.of("training"):
                    with torch.set_grad_enabled(learns):
                        self._micro_batch(work, batch.pack(rows_of_batch))
        return work.finish()

    def _micro_batch(self, work: _Work, forest: batch.Forest) -> None:
        device = self._base.device
        placed = lora.place(forest.spans, work.weights)
        context = attention.packed(forest, self._base.dtype, device)
        with self._router.using(placed):
            hidden = self._base.hidden(
                torch.as_tensor(forest.tokens, device=device), torch.as_tensor(forest.positions, device=device), context
            )
        targets, order = work.targets(forest, device)
        learning = work.learning(forest, device) if torch.is_grad_enabled() else None
        logprobs, kept = self._head.score(hidden.detach(), placed, targets, learning)
        slopes = work.score(forest, logprobs[order])
        if learning is not None:
            into = torch.empty_like(slopes)
            into[order] = slopes
            hidden.backward(self._head.backward(hidden.detach(), kept, targets, into))


class _Work:
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


_NOT_FINITE = "Check logprobs and advantages: the ratio exp(p - q) may have overflowed."


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
