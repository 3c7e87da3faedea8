"""The trainer in plain PyTorch: LoRA adapters of many models on one base model, trained in packed micro-batches.

A call of `run` packs the rows of all its passes into micro-batches. For each micro-batch:

    forward     packed tokens -> hidden states
    score       hidden states -> log-probability of every target, entropy of a position where a loss needs it
    losses      log-probabilities -> each pass's loss and its gradient
    backward    through head and body, into a gradient buffer for each model

The buffers are added to the models' gradients only when the whole run succeeded. If it failed, its passes run again one
by one, so that only the faulty pass returns an error. Between micro-batches the sampler can take the device.
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
from tinsmith.engine.custom_loss.runner import CustomLoss
from tinsmith.engine.device_sharing import DeviceScheduler
from tinsmith.engine.lora import adapter, linear, peft
from tinsmith.engine.lora.lm_head import LMHead, PackedTargets, ScoreGrads, TargetScores
from tinsmith.engine.model import attention, packing
from tinsmith.engine.model.loading import BaseModel
from tinsmith.engine.training import loss_specs, losses
from tinsmith.engine.training.activation_checkpointing import CheckpointSwitch
from tinsmith.engine.training.optimizer import AdapterSnapshot, GradientBuffer, TrainableAdapter
from tinsmith.engine_options import Recompute
from tinsmith.errors import BadRequest, EngineError, NotFound, TinsmithError

_CHECK_INPUTS = "Check logprobs and advantages: the ratio exp(p - q) may have overflowed."
_DIVERGED = "Load a saved state and continue from it with a lower learning_rate."

RECOMPUTE_FACTOR = 2
"""With `recompute: auto`, activations are recomputed for a row of more than this many micro-batches' tokens."""


class TorchTrainer:
    """Implements `engine.base.Trainer`. `capture` returns what the sampler samples from."""

    def __init__(
        self,
        base: BaseModel,
        head: LMHead,
        router: linear.Router,
        scheduler: DeviceScheduler,
        pass_tokens: int,
        switch: CheckpointSwitch,
        recompute: Recompute,
    ) -> None:
        self._base, self._head, self._router = base, head, router
        self._scheduler, self._pass_tokens = scheduler, pass_tokens
        self._switch, self._recompute = switch, recompute
        self._models: dict[str, TrainableAdapter] = {}
        self._lock = asyncio.Lock()

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        self._models[model_id] = self._new_adapter(lora, None)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        async with self._lock:
            spec = peft.read_spec(source)
            moments = peft.read_moments(source) if optimizer else None
            model = self._new_adapter(spec, source)
            if moments is not None:
                model.restore(moments)
            self._models[model_id] = model

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        async with self._lock:  # written in a thread: sampling continues, training waits
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

    def capture(self, model_id: str) -> AdapterSnapshot:
        """Snapshot of the model's current adapter."""
        return self._model(model_id).capture()

    def gradients(self, model_id: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Accumulated gradients of A and B by module name, for tests."""
        model = self._model(model_id)
        return {
            name: (pair.a.cpu().numpy().copy(), pair.b.cpu().numpy().copy())
            for name, pair in model.layout.pairs(model.gradient).items()
        }

    def _model(self, model_id: str) -> TrainableAdapter:
        if model_id not in self._models:
            raise NotFound(f"The engine holds no model '{model_id}'.", "Create it, or load it from a saved state.")
        return self._models[model_id]

    def _new_adapter(self, spec: LoraSpec, source: Path | None) -> TrainableAdapter:
        layout = linear.layout_for(self._base, spec)
        flat = layout.initial() if source is None else peft.read(source, layout)
        return TrainableAdapter(layout, flat.to(self._base.device), self._base.dtype)

    async def _run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        """Run the passes together; if that fails, one by one."""
        try:
            return [*await self._run_together(passes)]
        except Exception as error:  # noqa: BLE001 - any error is one pass's fault and must fail that pass alone
            if len(passes) > 1:
                return [(await self._run([request]))[0] for request in passes]
            return [error if isinstance(error, TinsmithError) else EngineError(f"The pass failed: {error!r}")]

    async def _run_together(self, passes: Sequence[Pass]) -> list[PassResult]:
        run = TrainingRun(
            passes, {name: self._model(name) for name in sorted({request.model_id for request in passes})}
        )
        try:
            for with_grad in (True, False):
                for rows in packing.micro_batches(run.rows(with_grad), self._pass_tokens):
                    async with self._scheduler.turn("training"):
                        with torch.set_grad_enabled(with_grad):
                            self._micro_batch(run, packing.pack(rows))
            return run.finish()
        except BaseException:
            run.discard()
            raise

    def _micro_batch(self, run: TrainingRun, tree: packing.PackedTree) -> None:
        """Forward, score, losses and, where gradients are enabled, backward."""
        batch = run.micro_batch(tree, self._base.device)
        with self._switch.set(self._recomputes(len(tree.tokens))), self._router.using(batch.adapters):
            hidden = self._forward(tree)
            scores = self._head.score(
                hidden.detach(), batch.adapters, batch.targets, batch.grad_mask, entropies=batch.needs_entropy
            )
            grads = run.losses(batch, scores)
            if batch.grad_mask is not None:
                hidden.backward(self._head.backward(hidden.detach(), scores, batch.targets, grads))

    def _forward(self, tree: packing.PackedTree) -> Tensor:
        """Hidden states [T, D] of the packed tokens."""
        device = self._base.device
        return self._base.hidden(
            torch.as_tensor(tree.tokens, device=device),
            torch.as_tensor(tree.positions, device=device),
            attention.packed_attention(tree, self._base.dtype, device),
        )

    def _recomputes(self, tokens: int) -> bool:
        """Whether layers recompute their activations in the backward of a micro-batch of this many tokens."""
        too_long = tokens > RECOMPUTE_FACTOR * self._pass_tokens
        return self._recompute == "always" or (self._recompute == "auto" and too_long)


@dataclass(frozen=True, slots=True)
class _Item:
    """One datum of a run: its pass, its place in the pass, and its model's slot."""

    pass_index: int
    datum_index: int
    datum: Datum
    slot: int
    grad_mask: np.ndarray
    """bool [N]: positions that may have a gradient."""

    @property
    def has_grad(self) -> bool:
        """Whether any position may have a gradient; a datum without runs without an autograd graph."""
        return bool(self.grad_mask.any())

    @property
    def targets_per_position(self) -> int:
        return self.datum.targets.size // len(self.datum.tokens)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A packed tree with its adapters and targets."""

    tree: packing.PackedTree
    adapters: list[adapter.PlacedAdapter]
    targets: PackedTargets
    order: Tensor
    """int64 [M]: the index in `targets` of each row's targets, row after row."""
    grad_mask: Tensor | None
    """bool [T]: packed positions with a target that may have a gradient; None without gradients."""
    needs_entropy: bool


class TrainingRun:
    """Data and results of one call of `Trainer.run`.

    Gradients accumulate in a buffer for each model. `finish` adds them to the models; `discard` drops them.
    """

    def __init__(self, passes: Sequence[Pass], models: Mapping[str, TrainableAdapter]) -> None:
        slots = {name: slot for slot, name in enumerate(models)}
        self._items = [
            _Item(pass_index, datum_index, datum, slots[request.model_id], loss_specs.grad_mask(request, datum))
            for pass_index, request in enumerate(passes)
            for datum_index, datum in enumerate(request.data)
        ]
        self._models = list(models.values())
        has_grad = any(item.has_grad for item in self._items)
        self._buffers = [model.gradient_buffer() for model in self._models] if has_grad else []
        self._weights = [self._with_buffer(slot) for slot in range(len(self._models))]
        needs_entropy = any(loss_specs.needs_entropy(request) for request in passes)
        self._passes = [_PassState(request, needs_entropy) for request in passes]

    def rows(self, with_grad: bool) -> list[packing.PackedRow]:
        """Rows of the data with a gradient, or of those without; a row's key is its index among the run's data."""
        return [
            packing.PackedRow(key=key, adapter=item.slot, tokens=item.datum.tokens)
            for key, item in enumerate(self._items)
            if item.has_grad is with_grad
        ]

    def micro_batch(self, tree: packing.PackedTree, device: torch.device) -> MicroBatch:
        """Adapters, targets and gradient mask of a packed tree."""
        items = {key: self._items[key] for key in tree.index}
        at = np.concatenate([np.repeat(index, items[key].targets_per_position) for key, index in tree.index.items()])
        ids = np.concatenate([item.datum.targets.reshape(-1) for item in items.values()])
        by_position = np.argsort(at, kind="stable")
        order = np.empty_like(by_position)
        order[by_position] = np.arange(len(by_position))
        grad_mask = np.zeros(len(tree.tokens), bool)
        for key, index in tree.index.items():
            grad_mask[index[items[key].grad_mask]] = True
        return MicroBatch(
            tree=tree,
            adapters=adapter.place_adapters(tree.spans, self._weights),
            targets=PackedTargets(
                torch.as_tensor(at[by_position], device=device), torch.as_tensor(ids[by_position], device=device)
            ),
            order=torch.as_tensor(order, device=device),
            grad_mask=torch.as_tensor(grad_mask, device=device) if torch.is_grad_enabled() else None,
            needs_entropy=any(self._passes[item.pass_index].needs_entropy for item in items.values()),
        )

    def losses(self, batch: MicroBatch, scores: TargetScores) -> ScoreGrads:
        """Store a micro-batch's scores, add up its losses and return their gradients, in the order of `scores`."""
        index = batch.tree.index
        sizes = [self._items[key].datum.targets.size for key in index]
        logprobs = dict(zip(index, scores.logprobs[batch.order].split(sizes), strict=True))
        grads = dict.fromkeys(index, torch.empty(0))
        entropy_grad = None if scores.entropies is None else torch.zeros_like(scores.entropies)
        by_pass: dict[int, list[int]] = {}
        for key in index:
            by_pass.setdefault(self._items[key].pass_index, []).append(key)
        for pass_index, keys in sorted(by_pass.items()):
            state, items = self._passes[pass_index], [self._items[key] for key in keys]
            at = torch.as_tensor(np.concatenate([index[key] for key in keys]), device=scores.logprobs.device)
            entropies = None if scores.entropies is None else scores.entropies[at]
            pass_logprobs = torch.cat([logprobs[key] for key in keys])
            state.store(items, pass_logprobs, entropies)
            grad, grad_of_entropy = state.loss(items, pass_logprobs, entropies)
            grads.update(zip(keys, grad.split([item.datum.targets.size for item in items]), strict=True))
            if entropy_grad is not None and grad_of_entropy is not None:
                entropy_grad.index_add_(0, at, grad_of_entropy)  # data that share a position add up
        by_row = torch.cat([grads[key] for key in index])
        by_position = torch.empty_like(by_row)
        by_position[batch.order] = by_row
        return ScoreGrads(by_position, entropy_grad)

    def finish(self) -> list[PassResult]:
        """Add the gradients to the models and return the results."""
        if not all(bool(torch.isfinite(buffer.flat.sum())) for buffer in self._buffers):
            raise BadRequest("The gradient of this request is not finite; it was discarded.", _CHECK_INPUTS)
        for model, buffer in self._with_buffers():
            model.accept(buffer)
        return [state.result() for state in self._passes]

    def discard(self) -> None:
        """Leave the models as they were before the run."""
        for model, buffer in self._with_buffers():
            model.discard(buffer)

    def _with_buffers(self) -> list[tuple[TrainableAdapter, GradientBuffer]]:
        return list(zip(self._models, self._buffers, strict=True)) if self._buffers else []

    def _with_buffer(self, slot: int) -> adapter.AdapterWeights:
        """A model's adapter, with this run's gradient buffer if the run has gradients."""
        weights = self._models[slot].weights()
        if not self._buffers:
            return weights
        return adapter.AdapterWeights(weights.scale, weights.pairs, self._buffers[slot].pairs, weights.stacked_cache)


class _PassState:
    """A pass with the results of its data so far."""

    def __init__(self, request: Pass, run_needs_entropy: bool) -> None:
        self._request = request
        self.needs_entropy = loss_specs.needs_entropy(request)
        self._logprobs = _empty_arrays([datum.targets.shape for datum in request.data])
        self._entropies = _empty_arrays([datum.tokens.shape for datum in request.data] if run_needs_entropy else [])
        self._metrics: dict[str, float] = {"loss:sum": 0.0}
        self._custom_loss = CustomLoss(request.graph) if request.graph is not None else None

    def store(self, items: Sequence[_Item], logprobs: Tensor, entropies: Tensor | None) -> None:
        """Keep the log-probabilities [targets] and entropies [positions] of some data, each concatenated."""
        if not bool(logprobs.isfinite().all()):  # checked here because a loss may not read all of them
            raise BadRequest("This model's logprobs are not finite: it has diverged.", _DIVERGED)
        _copy_into(self._logprobs, items, logprobs.split([item.datum.targets.size for item in items]))
        if entropies is not None:
            _copy_into(self._entropies, items, entropies.split([len(item.datum.tokens) for item in items]))

    def loss(self, items: Sequence[_Item], logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Add the loss and metrics of some data; returns d loss / d logprob and d loss / d entropy."""
        if self._custom_loss is not None:
            return self._uploaded_loss(self._custom_loss, items, logprobs), None
        request, data = self._request, [item.datum for item in items]
        leaf = logprobs.double().requires_grad_()
        entropy_leaf = entropies.double().requires_grad_() if entropies is not None else None
        sizes = [datum.targets.size for datum in data]
        targets = losses.LossInputs(
            logprobs=leaf,
            entropies=entropy_leaf,
            sequence=torch.as_tensor(np.repeat(np.arange(len(data)), sizes), device=leaf.device),
            inputs={
                name: torch.as_tensor(values, device=leaf.device).double()
                for name, values in _concatenated_inputs(request, data).items()
            },
        )
        settings, estimator = loss_specs.numeric_settings(request), loss_specs.kl_estimator(request)
        with torch.enable_grad():
            loss, metrics = losses.objective(request.loss_fn, targets, settings, estimator, request.loss_config)
        leaves = [leaf] if entropy_leaf is None else [leaf, entropy_leaf]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        self._check_finite(loss, *grads)
        self._add({name: float(value.detach()) for name, value in {"loss:sum": loss, **metrics}.items()})
        return grads[0].float(), grads[1].float() if entropy_leaf is not None else None

    def result(self) -> PassResult:
        """Metrics are sums over the data; those named `:mean` are divided by the number of data."""
        count = len(self._request.data)
        metrics = {
            name: value / count if name.endswith(":mean") else float(value) for name, value in self._metrics.items()
        }
        entropies = tuple(self._entropies) if self._request.loss_config.get("return_entropy") else None
        return PassResult(logprobs=tuple(self._logprobs), metrics=metrics, entropies=entropies)

    def _uploaded_loss(self, custom_loss: CustomLoss, items: Sequence[_Item], logprobs: Tensor) -> Tensor:
        """The same for a loss that a client uploaded, datum by datum."""
        grads = []
        for item, values in zip(items, logprobs.split([item.datum.targets.size for item in items]), strict=True):
            loss, grad, metrics = custom_loss.run(values.reshape(item.datum.targets.shape), item.datum.inputs)
            self._check_finite(torch.tensor(loss), grad)
            self._add({"loss:sum": loss, **metrics})
            grads.append(grad.reshape(-1).to(logprobs.device))
        return torch.cat(grads)

    def _add(self, metrics: Mapping[str, float]) -> None:
        self._metrics.update({name: self._metrics.get(name, 0.0) + value for name, value in metrics.items()})

    def _check_finite(self, loss: Tensor, *grads: Tensor) -> None:
        if not bool(torch.isfinite(loss)) or not all(bool(torch.isfinite(grad).all()) for grad in grads):
            value = float(loss.detach())
            raise BadRequest(f"The {self._request.loss_fn} loss of this request is {value}.", _CHECK_INPUTS)


def _empty_arrays(shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """An uninitialized float32 array of each shape, all views of one allocation.

    Thousands of small arrays allocated during a run would fragment the heap between activations.
    """
    ends = np.cumsum([math.prod(shape) for shape in shapes], dtype=np.int64)
    pieces = np.split(np.empty(ends[-1] if shapes else 0, np.float32), ends)[: len(shapes)]
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _copy_into(arrays: Sequence[np.ndarray], items: Sequence[_Item], values: Sequence[Tensor]) -> None:
    for item, tensor in zip(items, values, strict=True):
        array = arrays[item.datum_index]
        array[...] = tensor.cpu().numpy().reshape(array.shape)


def _concatenated_inputs(request: Pass, data: Sequence[Datum]) -> dict[str, np.ndarray]:
    """Each loss input of the data, flat and concatenated."""
    by_datum = [loss_specs.loss_inputs(request, datum) for datum in data]
    return {name: np.concatenate([inputs[name] for inputs in by_datum]) for name in by_datum[0]}
