"""A fake engine in numpy, without torch or a download, for tests and for trying the service.

The model is a bigram model (`fake.model`) with LoRA adapters, and the losses are simplified (`fake.losses`). AdamW,
seeds, versions and files are real and deterministic.

Passes are computed datum by datum, so the result of a request never depends on other requests. Files are read and
written in threads, because the API shares this event loop: a sync of the disk would delay every other request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from tinsmith.engine.base import (
    AdamParams,
    Datum,
    LoraSpec,
    ModelCard,
    OnDelta,
    Pass,
    PassResult,
    ProbeChange,
    SampleRequest,
    SampleResult,
    SavedAdapter,
    folder_of,
)
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.custom_loss.process import LossProcess
from tinsmith.engine.fake.losses import DatumLoss, builtin_loss, custom_loss
from tinsmith.engine.fake.model import HIDDEN, BigramModel, FakeAdapter, Sampling, entropy, read_adapter, write_adapter
from tinsmith.engine.fake.versions import FakeVersions
from tinsmith.engine.training.loss_specs import CUSTOM, SHADOW, needs_entropy
from tinsmith.engine.training.model_locks import ModelLocks
from tinsmith.engine.training.shadow_plan import ShadowPlan, shadow_settings, weighted_sum
from tinsmith.errors import BadRequest, EngineError, TinsmithError


@dataclass(slots=True)
class _Model:
    """An adapter in training: weights, the gradient since the last step, moments of A and B, steps taken."""

    weights: FakeAdapter
    grad: list[np.ndarray] = field(default_factory=list)
    moments: list[np.ndarray] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.grad = [np.zeros_like(self.weights.a), np.zeros_like(self.weights.b)]
        if not self.moments:
            self.moments = [np.zeros_like(g) for g in self.grad for _ in range(2)]

    def after_step(self, grads: Sequence[np.ndarray], adam: AdamParams) -> _Model:
        """The model after a step of AdamW; this one is left as it is, because versions share its arrays."""
        clip = min(1.0, adam.grad_clip_norm / (_norm(grads) + 1e-6)) if adam.grad_clip_norm > 0 else 1.0
        steps, new, moments = self.steps + 1, [], []
        for index, (value, grad) in enumerate(zip((self.weights.a, self.weights.b), grads, strict=True)):
            first, second = self.moments[2 * index : 2 * index + 2]
            first = adam.beta1 * first + (1 - adam.beta1) * clip * grad
            second = adam.beta2 * second + (1 - adam.beta2) * (clip * grad) ** 2
            scale = np.sqrt(second / (1 - adam.beta2**steps)) + adam.eps
            update = first / (1 - adam.beta1**steps) / scale + adam.weight_decay * value
            new.append((value - adam.learning_rate * update).astype(value.dtype))
            moments += [first.astype(value.dtype), second.astype(value.dtype)]
        return _Model(replace(self.weights, a=new[0], b=new[1]), moments=moments, steps=steps)


def _norm(grads: Sequence[np.ndarray]) -> float:
    return float(np.sqrt(sum(float((grad.astype(np.float64) ** 2).sum()) for grad in grads)))


def _read_model(source: SavedAdapter, *, optimizer: bool) -> _Model:
    """The model in a folder; without optimizer its moments start at zero."""
    folder = folder_of(source)
    weights, moments = read_adapter(folder)
    if not optimizer:
        return _Model(weights)
    if moments is None:
        raise BadRequest(f"{folder.name} has no optimizer state.", "Load it without the optimizer.")
    return _Model(weights, moments=moments[:4], steps=int(moments[4][0]))


Block = tuple[slice, np.ndarray, np.ndarray]
"""Positions of a datum, their hidden states and their log-softmax."""


def _read_logprobs(datum: Datum, blocks: Iterable[Block], *, entropies: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """The targets' logprobs, and the entropy of each position, 0 without `entropies`."""
    targets = datum.targets.reshape(len(datum.targets), -1)
    logprobs, values = np.empty(targets.shape, dtype=np.float64), np.zeros(len(targets), dtype=np.float64)
    for rows, _, logp in blocks:
        logprobs[rows] = np.take_along_axis(logp, targets[rows], axis=1)
        if entropies:
            values[rows] = entropy(logp)
    return logprobs.reshape(datum.targets.shape), values


class FakeEngine:
    """Implements `engine.interface.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        self._bigram = BigramModel(config.source)
        self._models: dict[str, _Model] = {}
        self._versions = FakeVersions()
        self._sampling: set[str] = set()
        self._locks = ModelLocks()
        self._losses = LossProcess()

    @property
    def card(self) -> ModelCard:
        return self._bigram.card

    @property
    def progress(self) -> int:
        return 0  # every call is short

    async def release_memory(self) -> None:
        """Nothing is cached."""

    async def close(self) -> None:
        self._models.clear()
        self._versions.clear()
        self._losses.close()

    # Trainer ------------------------------------------------------------------------------------------------------

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        rng = np.random.default_rng(lora.seed & (2**64 - 1))
        bound = np.sqrt(3.0 / HIDDEN)
        a = rng.uniform(-bound, bound, (lora.rank, HIDDEN)).astype(np.float32)
        b = np.zeros((self._bigram.card.vocab_size, lora.rank), dtype=np.float32)
        self._models[model_id] = _Model(FakeAdapter(lora=lora, a=a, b=b))

    async def fork(self, model_id: str, source: str | SavedAdapter, *, optimizer: bool) -> int:
        """Adapters are never changed in place, so references are enough."""
        if not isinstance(source, str):
            await self.load(model_id, source, optimizer=optimizer)
        else:
            parent = self._model(source)
            self._models[model_id] = _Model(parent.weights)
            if optimizer:
                self._models[model_id].moments, self._models[model_id].steps = parent.moments, parent.steps
        weights = self._models[model_id].weights
        return weights.a.size + weights.b.size

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        async with self._locks.of_all(request.model_id for request in passes):
            return await self._run_all(passes)

    async def _run_all(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        results: list[PassResult | TinsmithError] = []
        for request in passes:
            try:
                run = self._run_shadow if request.loss_fn == SHADOW else self._run_pass
                results.append(await run(request))
            except TinsmithError as error:
                results.append(error)
        return results

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """AdamW; `grad_norm` is the norm before clipping."""
        async with self._locks.of(model_id):
            model = self._model(model_id)
            self._models[model_id] = model.after_step(model.grad, adam)
            return {"grad_norm": _norm(model.grad)}

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        model = self._model(model_id)
        moments = [*model.moments, np.asarray([model.steps], dtype=np.int64)] if optimizer else None
        return await asyncio.to_thread(write_adapter, to, model.weights, moments)

    async def load(self, model_id: str, source: SavedAdapter, *, optimizer: bool) -> None:
        self._models[model_id] = await asyncio.to_thread(_read_model, source, optimizer=optimizer)

    async def drop(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def _model(self, model_id: str) -> _Model:
        if model_id not in self._models:
            raise EngineError(f"The engine has no model {model_id}.")
        return self._models[model_id]

    async def _run_pass(self, request: Pass) -> PassResult:
        model = self._model(request.model_id)
        metrics, logprobs, all_entropies = {"loss:sum": 0.0}, [], []
        grads = [np.zeros_like(g) for g in model.grad]
        evaluate = custom_loss(request, self._losses) if request.loss_fn == CUSTOM else partial(builtin_loss, request)
        for datum in request.data:
            await asyncio.sleep(0)  # the API shares this event loop
            blocks: Iterable[Block] = self._bigram.logprobs(datum.tokens, model.weights)
            if is_short := len(datum.tokens) <= self._bigram.rows:
                blocks = list(blocks)
            p, entropies = _read_logprobs(datum, blocks, entropies=needs_entropy(request))
            loss = evaluate(datum, p, entropies)
            for name, value in {"loss:sum": loss.loss, **loss.metrics}.items():
                metrics[name] = metrics.get(name, 0.0) + value / (len(request.data) if name.endswith(":mean") else 1)
            logprobs.append(p.astype(np.float32))
            all_entropies.append(entropies.astype(np.float32))
            if not request.forward_only:
                self._backward(datum, loss, model.weights, grads, blocks if is_short else None)
        for total, grad in zip(
            model.grad, grads, strict=True
        ):  # only now, because an error above must leave the gradient unchanged
            total += grad
        with_entropies = bool(request.loss_config.get("return_entropy"))
        return PassResult(
            logprobs=tuple(logprobs), metrics=metrics, entropies=tuple(all_entropies) if with_entropies else None
        )

    async def _run_shadow(self, request: Pass) -> PassResult:
        """Virtual steps, whose changes are all computed exactly. Raises BadRequest if one is not finite."""
        plan, settings = ShadowPlan(request), shadow_settings(request)
        inherits = settings.optimizer == "adam_inherit"
        model = self._model(request.model_id)
        if request.start is not None:
            model = await asyncio.to_thread(_read_model, request.start, optimizer=inherits)
        start = model if inherits else _Model(model.weights)
        before, trained = [self._forward(probe, start.weights)[0] for probe in plan.probes], []
        changes: dict[tuple[int, int], ProbeChange] = {}
        for number, step in enumerate(plan.steps):
            await asyncio.sleep(0)  # the API shares this event loop
            grads = [np.zeros_like(grad) for grad in start.grad]
            logprobs = [self._forward(datum, start.weights)[0] for datum in step.train]
            for datum in step.train:
                loss = DatumLoss(loss=0.0, grad=-datum.inputs["weights"], entropy_grad=np.zeros(len(datum.tokens)))
                self._backward(datum, loss, start.weights, grads)
            trained.append([p.astype(np.float32) for p in logprobs])
            if settings.optimizer == "sgd":
                a, b = (
                    each - settings.adam.learning_rate * grad
                    for each, grad in zip((start.weights.a, start.weights.b), grads, strict=True)
                )
                moved = replace(start.weights, a=a, b=b)
            else:
                moved = start.after_step(grads, settings.adam).weights
            for probe in step.probes:
                post = self._forward(plan.probes[probe], moved)[0]
                delta = weighted_sum(plan.probes[probe], post - before[probe])
                if not np.isfinite(delta):
                    raise BadRequest(f"A shadow delta is {delta}.", "Lower shadow/lr or weights.")
                exact = post.astype(np.float32) if settings.exact else None
                changes[number, probe] = ProbeChange(delta=delta, logprobs_post=exact)
        return plan.result(trained, [values.astype(np.float32) for values in before], changes)

    def _forward(self, datum: Datum, weights: FakeAdapter) -> tuple[np.ndarray, np.ndarray]:
        """The targets' logprobs, and the entropy of each position."""
        return _read_logprobs(datum, self._bigram.logprobs(datum.tokens, weights))

    def _backward(
        self,
        datum: Datum,
        loss: DatumLoss,
        weights: FakeAdapter,
        grads: list[np.ndarray],
        blocks: Iterable[Block] | None = None,
    ) -> None:
        """Add a datum's gradients. `blocks` are its logprobs, if they are at hand."""
        targets = datum.targets.reshape(len(datum.targets), -1)
        by_logprob = loss.grad.reshape(targets.shape).astype(np.float32)
        trained = np.flatnonzero(by_logprob.any(axis=1) | (loss.entropy_grad != 0))
        targets, by_logprob, entropy_by = targets[trained], by_logprob[trained], loss.entropy_grad[trained]
        scale = np.float32(weights.scale)
        if blocks is None or len(trained) < len(datum.tokens):
            blocks = self._bigram.logprobs(datum.tokens[trained], weights)
        for rows, hidden, logp in blocks:
            probs = np.exp(logp)
            by_logit = -probs * by_logprob[rows].sum(axis=1, keepdims=True)
            for column in range(targets.shape[1]):
                by_logit[np.arange(len(by_logit)), targets[rows, column]] += by_logprob[rows, column]
            if entropy_by.any():
                entropy_by_logit = probs * (logp + entropy(logp)[:, None])
                by_logit -= entropy_by[rows, None].astype(np.float32) * entropy_by_logit
            grads[0] += scale * (by_logit @ weights.b).T @ hidden
            grads[1] += scale * by_logit.T @ (hidden @ weights.a.T)

    # Sampler ------------------------------------------------------------------------------------------------------

    async def capture(self, model_id: str, version: str) -> None:
        """Adapters are never changed in place, so a reference is enough."""
        self._versions.capture(version, self._model(model_id).weights)

    async def persist(self, version: str, to: Path) -> int:
        return await self._versions.persist(version, to)

    async def attach(self, version: str, source: SavedAdapter) -> None:
        self._versions.attach(version, folder_of(source))

    async def detach(self, version: str) -> None:
        self._versions.detach(version)

    async def cancel(self, request_id: str) -> None:
        """Make the request's `sample` call raise Gone at its next token."""
        self._sampling.discard(request_id)

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        self._sampling.add(request.request_id)
        numbers = range(request.first_sample, request.first_sample + request.num_samples)
        try:
            weights = None if request.version is None else await self._versions.adapter(request.version)
            sampling = Sampling(self._bigram, request, weights, lambda: request.request_id not in self._sampling)
            sequences = [await sampling.sequence(index, on_delta) for index in numbers]
        finally:
            self._sampling.discard(request.request_id)
        return sampling.add_prompt_results(SampleResult(sequences=tuple(sequences)))
