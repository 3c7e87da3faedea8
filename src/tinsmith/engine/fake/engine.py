"""An engine in arithmetic: numpy alone, no torch, no download, ready at once. For tests and for trying the service.

Its language is a bigram model (`fakemodel`) under LoRA adapters (A from the seed, B zero). So losses, gradients, AdamW,
seeds, versions and files are all real and deterministic; only the language is not.

Passes are computed datum by datum, so what is packed beside a request never changes its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from tinsmith.engine.base import AdamParams, Datum, Heard, LoraSpec, ModelCard, Pass, PassResult, Sampled, SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.losses import Scored, scored, uploaded
from tinsmith.engine.fake.model import HIDDEN, Bigram, Reply, Weights, entropies_of, read_folder, write_folder
from tinsmith.engine.training.loss_specs import CUSTOM
from tinsmith.errors import BadRequest, EngineError, Gone, TinsmithError


@dataclass(slots=True)
class _Model:
    """An adapter in training: weights, the gradient since the last step, moments, steps taken."""

    weights: Weights
    grad: list[np.ndarray] = field(default_factory=list)
    moments: list[np.ndarray] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.grad = [np.zeros_like(self.weights.a), np.zeros_like(self.weights.b)]
        if not self.moments:
            self.moments = [np.zeros_like(g) for g in self.grad for _ in range(2)]


class FakeEngine:
    """Engine in full."""

    def __init__(self, config: EngineConfig) -> None:
        self._bigram = Bigram(config.source)
        self._models: dict[str, _Model] = {}
        self._versions: dict[str, Weights | Path] = {}
        self._sampling: set[str] = set()

    @property
    def card(self) -> ModelCard:
        """What is loaded."""
        return self._bigram.card

    async def close(self) -> None:
        """Forget everything."""
        self._models.clear()
        self._versions.clear()

    # Trainer ------------------------------------------------------------------------------------------------------

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        """A fresh adapter: A uniform from the seed, B zero."""
        rng = np.random.default_rng(lora.seed & (2**64 - 1))
        bound = np.sqrt(3.0 / HIDDEN)
        a = rng.uniform(-bound, bound, (lora.rank, HIDDEN)).astype(np.float32)
        b = np.zeros((self._bigram.card.vocab_size, lora.rank), dtype=np.float32)
        self._models[model_id] = _Model(Weights(lora=lora, a=a, b=b))

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        """Each request by itself, in order."""
        results: list[PassResult | TinsmithError] = []
        for request in passes:
            try:
                results.append(await self._run_one(request))
            except TinsmithError as error:
                results.append(error)
        return results

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """AdamW as torch's, on A and B; the norm is from before clipping."""
        model = self._model(model_id)
        norm = float(np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in model.grad)))
        clip = adam.grad_clip_norm / (norm + 1e-6) if 0 < adam.grad_clip_norm < norm else 1.0
        model.steps += 1
        fix1, fix2 = 1 - adam.beta1**model.steps, 1 - adam.beta2**model.steps
        new, moments = [], []
        for index, value in enumerate((model.weights.a, model.weights.b)):
            g = model.grad[index] * np.float32(clip)
            first, second = model.moments[2 * index : 2 * index + 2]
            first = first * np.float32(adam.beta1) + g * np.float32(1 - adam.beta1)
            second = second * np.float32(adam.beta2) + g * g * np.float32(1 - adam.beta2)
            update = (first / np.float32(fix1)) / (np.sqrt(second / np.float32(fix2)) + np.float32(adam.eps))
            kept = value * np.float32(1 - adam.learning_rate * adam.weight_decay)
            new.append(kept - np.float32(adam.learning_rate) * update)
            moments += [first, second]
        model.weights = replace(model.weights, a=new[0], b=new[1])  # replaced, never written into: versions share it
        model.moments = moments
        model.grad = [np.zeros_like(g) for g in model.grad]
        return {"grad_norm": norm}

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        """A PEFT-like folder."""
        model = self._model(model_id)
        moments = [*model.moments, np.asarray([model.steps], dtype=np.int64)] if optimizer else None
        return write_folder(to, model.weights, moments)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        """A saved adapter into a model that may be new."""
        weights, moments = read_folder(source)
        if not optimizer:
            self._models[model_id] = _Model(weights)
            return
        if moments is None:
            raise BadRequest(f"{source.name} holds no optimizer state.", "Load it without the optimizer.")
        self._models[model_id] = _Model(weights, moments=moments[:4], steps=int(moments[4][0]))

    async def drop(self, model_id: str) -> None:
        """Forget the model."""
        self._models.pop(model_id, None)

    def _model(self, model_id: str) -> _Model:
        if model_id not in self._models:
            raise EngineError(f"The engine does not hold model {model_id}.")
        return self._models[model_id]

    async def _run_one(self, request: Pass) -> PassResult:
        model = self._model(request.model_id)
        metrics, logprobs, entropies = {"loss:sum": 0.0}, [], []
        grads = [np.zeros_like(g) for g in model.grad]
        evaluate = uploaded(request) if request.loss_fn == CUSTOM else partial(scored, request)
        for datum in request.data:
            await asyncio.sleep(0)  # it shares the API's event loop
            p, spread = self._score(datum, model.weights)
            one = evaluate(datum, p, spread)
            for name, value in {"loss:sum": one.loss, **one.metrics}.items():
                metrics[name] = metrics.get(name, 0.0) + value / (len(request.data) if name.endswith(":mean") else 1)
            logprobs.append(p.astype(np.float32))
            entropies.append(spread.astype(np.float32))
            if not request.forward_only:
                self._backward(datum, one, model.weights, grads)
        for total, grad in zip(model.grad, grads, strict=True):  # all data were fine: now it counts
            total += grad
        wanted = bool(request.loss_config.get("return_entropy"))
        return PassResult(logprobs=tuple(logprobs), metrics=metrics, entropies=tuple(entropies) if wanted else None)

    def _score(self, datum: Datum, weights: Weights) -> tuple[np.ndarray, np.ndarray]:
        """The targets' logprobs, and the entropy of each position."""
        targets = datum.targets.reshape(len(datum.targets), -1)
        found, spread = np.empty(targets.shape, dtype=np.float64), np.empty(len(targets), dtype=np.float64)
        for rows, _, logp in self._bigram.logprobs(datum.tokens, weights):
            found[rows] = np.take_along_axis(logp, targets[rows], axis=1)
            spread[rows] = entropies_of(logp)
        return found.reshape(datum.targets.shape), spread

    def _backward(self, datum: Datum, one: Scored, weights: Weights, grads: list[np.ndarray]) -> None:
        targets = datum.targets.reshape(len(datum.targets), -1)
        slopes = one.slope.reshape(targets.shape).astype(np.float32)
        scale = np.float32(weights.scale)
        for rows, hidden, logp in self._bigram.logprobs(datum.tokens, weights):
            chances = np.exp(logp)
            by_logit = -chances * slopes[rows].sum(axis=1, keepdims=True)
            for column in range(targets.shape[1]):
                by_logit[np.arange(len(by_logit)), targets[rows, column]] += slopes[rows, column]
            if one.steep.any():
                spread = chances * (logp + entropies_of(logp)[:, None])
                by_logit -= one.steep[rows, None].astype(np.float32) * spread
            grads[0] += scale * (by_logit @ weights.b).T @ hidden
            grads[1] += scale * by_logit.T @ (hidden @ weights.a.T)

    # Sampler ------------------------------------------------------------------------------------------------------

    async def capture(self, model_id: str, version: str) -> None:
        """Weights are never written into, so keeping them is a copy."""
        self._versions[version] = self._model(model_id).weights

    async def persist(self, version: str, to: Path) -> int:
        """A captured version as a folder."""
        return write_folder(to, self._version(version), None)

    async def attach(self, version: str, source: Path) -> None:
        """A folder known as a version, read when first needed."""
        self._versions[version] = source

    async def detach(self, version: str) -> None:
        """Forget a version."""
        self._versions.pop(version, None)

    async def cancel(self, request_id: str) -> None:
        """The request's sample call raises Gone at its next token."""
        self._sampling.discard(request_id)

    async def sample(self, request: SampleRequest, heard: Heard | None = None) -> Sampled:
        """Token by token, yielding to other callers."""
        weights = None if request.version is None else self._version(request.version)
        reply = Reply(self._bigram, request, weights, lambda: request.request_id in self._sampling)
        self._sampling.add(request.request_id)
        try:
            sequences = [await reply.sequence(index, heard) for index in range(request.num_samples)]
        finally:
            self._sampling.discard(request.request_id)
        return reply.about_prompt(Sampled(sequences=tuple(sequences)))

    def _version(self, version: str) -> Weights:
        held = self._versions.get(version)
        if held is None:
            raise Gone(f"The engine does not hold adapter version {version}.", "Attach it again.")
        if isinstance(held, Path):
            held = self._versions[version] = read_folder(held)[0]
        return held
