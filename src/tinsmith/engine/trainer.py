"""The Trainer in plain torch: adapters of many models on one base, trained in packed passes.

A run goes: rows of all passes -> micro-batches of packed tokens -> hidden states (with a graph only where a gradient is
wanted) -> logprobs of every target -> each pass's loss and its gradient in the logprobs -> back through head and body
into each model's gradient. Gradients of a run count only when the whole run went well; if it did not, its
passes are run again one by one, so that one bad request fails alone. Between micro-batches the sampler has its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tinsmith.engine import adapters, attention, batch, lora
from tinsmith.engine.base import AdamParams, LoraSpec, Pass, PassResult
from tinsmith.engine.config import Recompute
from tinsmith.engine.head import Head, Slopes
from tinsmith.engine.live import Captured, Model
from tinsmith.engine.models import BaseModel
from tinsmith.engine.recompute import Switch
from tinsmith.engine.turns import Turns
from tinsmith.engine.work import Work
from tinsmith.errors import EngineError, NotFound, TinsmithError

BUDGETS = 2
"""A row of so many times the tokens of a micro-batch keeps its activations; a longer one computes them again."""


class TorchTrainer:
    """Implements `engine.base.Trainer`; `capture` is what the sampler takes."""

    def __init__(
        self,
        base: BaseModel,
        head: Head,
        router: lora.Router,
        turns: Turns,
        pass_tokens: int,
        switch: Switch,
        recompute: Recompute,
    ) -> None:
        self._base, self._router, self._turns, self._pass_tokens = base, router, turns, pass_tokens
        self._switch, self._recompute = switch, recompute
        self._head = head
        self._models: dict[str, Model] = {}
        self._lock = asyncio.Lock()

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        self._models[model_id] = self._made(lora, None)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        async with self._lock:
            spec = adapters.read_spec(source)
            moments = adapters.read_moments(source) if optimizer else None
            model = self._made(spec, source)
            if moments is not None:
                model.restore(moments)
            self._models[model_id] = model

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        async with self._lock:  # in a thread: the sampler goes on, and nothing trains meanwhile
            model = self._model(model_id)
            moments = model.moments() if optimizer else None
            source = self._base.card.source
            return await asyncio.to_thread(adapters.write, to, model.layout, model.master.detach(), source, moments)

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
        layout = lora.layout_for(self._base, spec)
        flat = layout.initial() if source is None else adapters.read(source, layout)
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
                for rows_of_batch in batch.micro_batches(rows, self._pass_tokens):
                    async with self._turns.of("training"):
                        forest = batch.pack(rows_of_batch)
                        with torch.set_grad_enabled(learns), self._switch.set(self._recomputes(len(forest.tokens))):
                            self._micro_batch(work, forest)
            return work.finish()
        except BaseException:
            work.abandon()
            raise

    def _recomputes(self, tokens: int) -> bool:
        """Whether layers compute again what the backward needs: by choice, or because a row is beyond the budget."""
        return self._recompute == "always" or (self._recompute == "auto" and tokens > BUDGETS * self._pass_tokens)

    def _micro_batch(self, work: Work, forest: batch.Forest) -> None:
        device = self._base.device
        placed = lora.place(forest.spans, work.weights)
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
