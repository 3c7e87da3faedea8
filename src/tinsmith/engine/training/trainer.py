"""The trainer in plain PyTorch: LoRA adapters of many models on one base model, trained in packed micro-batches.

A call of `run` makes a training run for each model, and on a CPU one for each thread that computes some of its rows;
runs in progress share micro-batches (`micro_batches.queue`). For each micro-batch (`micro_batches.runner`):

    forward     packed tokens -> hidden states
    score       hidden states -> log-probability of every target, entropy of a position where a loss needs it
    losses      log-probabilities -> each pass's loss and its gradient
    backward    through head and body, into a gradient buffer for each run

Rows that are larger than a micro-batch, alone or because they share prefixes, are computed in pieces on a CPU.
A buffer is added to its model's gradient only when the whole run succeeded. If it failed, its passes run again one by
one, each in micro-batches of its own, so that only the faulty pass returns an error. Between micro-batches the sampler
can take the device, and models without a run can take steps and be saved. With several ranks, each computes a share of
the rows; what they do together is in `exchange`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import AdamParams, LoraSpec, Pass, PassResult, SavedAdapter, folder_of
from tinsmith.engine.custom_loss.process import LossProcess
from tinsmith.engine.device_sharing import DeviceScheduler
from tinsmith.engine.exchange.reading import read_saved
from tinsmith.engine.lora import linear, peft
from tinsmith.engine.lora.adapter import AdapterLayout
from tinsmith.engine.lora.lm_head import LMHead
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.threads.compute import ComputeThreads
from tinsmith.engine.training.activation_checkpointing import CheckpointSwitch
from tinsmith.engine.training.exchange import ALONE, Exchange, Job
from tinsmith.engine.training.micro_batches.lockstep import LockstepQueue
from tinsmith.engine.training.micro_batches.plan import thread_shares
from tinsmith.engine.training.micro_batches.queue import MicroBatchQueue
from tinsmith.engine.training.micro_batches.runner import MicroBatchRunner
from tinsmith.engine.training.model_locks import ModelLocks
from tinsmith.engine.training.optimizer import AdapterSnapshot, TrainableAdapter
from tinsmith.engine.training.run_rows import RunRows
from tinsmith.engine.training.shadow import Background, ShadowRun, ShadowStart
from tinsmith.engine.training.shadow_plan import SHADOW, shadow_settings
from tinsmith.engine.training.training_run import TrainingRun, check_gradients
from tinsmith.engine_options import Recompute
from tinsmith.errors import EngineError, NotFound, TinsmithError, Unsupported

MAX_SAVED = 4
"""Saved adapters kept in memory for further forks."""


class TorchTrainer:
    """Implements `engine.interface.Trainer`. `capture` returns what the sampler samples from."""

    def __init__(
        self,
        base: BaseModel,
        head: LMHead,
        active: linear.ActiveAdapters,
        scheduler: DeviceScheduler,
        pass_tokens: int,
        switch: CheckpointSwitch,
        recompute: Recompute,
        *,
        packs_requests: bool = True,
        at_once: int = 1,
        exchange: Exchange | None = None,
    ) -> None:
        """`packs_requests`: whether requests may share micro-batches, which changes how their sums round. `at_once`:
        micro-batches that are computed at the same time. `exchange` connects this trainer to the other ranks of its
        group."""
        self._exchange = exchange or ALONE
        self._packs_requests = packs_requests
        self._base, self._scheduler = base, scheduler
        self._models: dict[str, TrainableAdapter] = {}
        self._saved: dict[Exchange, OrderedDict[Path, TrainableAdapter]] = {}
        """Saved adapters that were forked last, by their folders, which never change."""
        self._locks = ModelLocks()
        self._device_lock = asyncio.Lock()
        self._losses = LossProcess(torch.get_num_threads())
        cuts = base.cuts_trees and not self._exchange.lockstep
        threads = ComputeThreads(at_once)
        self._runner = MicroBatchRunner(base, head, active, switch, recompute, pass_tokens, threads, cuts=cuts)
        self._queue: MicroBatchQueue | LockstepQueue
        if self._exchange.lockstep:
            self._queue = LockstepQueue(self._runner, self._turn, self._exchange)
        else:
            self._queue = MicroBatchQueue(self._runner, self._turn)

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        layout = linear.layout_for(self._base, lora)
        self._models[model_id] = self._adapter(layout, layout.initial())

    async def load(self, model_id: str, source: SavedAdapter, *, optimizer: bool) -> None:
        folder = folder_of(source)
        async with self._locks.of(model_id):
            model = self._adapter(*await self._exchange.read(lambda: read_saved(folder, self._base)))
            if optimizer:
                model.restore(await self._exchange.read(lambda: peft.read_moments(folder, model.layout)))
            self._models[model_id] = model

    async def fork(self, model_id: str, source: str | SavedAdapter, *, optimizer: bool) -> int:
        async with self._locks.of(str(source)):
            if isinstance(source, str):
                parent = self._model(source)
                fork = parent.fork()
                if optimizer:
                    fork.restore(parent.moments().copy())
            else:
                folder = folder_of(source)
                fork = (await self._saved_adapter(folder, self._exchange)).fork()
                if optimizer:
                    fork.restore(await self._exchange.read(lambda: peft.read_moments(folder, fork.layout)))
            self._models[model_id] = fork
            return fork.layout.parameters

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        async with self._locks.of(model_id):  # written in a thread: all but this model goes on
            model = self._model(model_id)
            moments = model.moments() if optimizer else None
            source = self._base.card.source
            return await asyncio.to_thread(peft.write, to, model.layout, model.master.detach(), source, moments)

    async def drop(self, model_id: str) -> None:
        async with self._locks.of(model_id):
            self._models.pop(model_id, None)

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        async with self._locks.of(model_id):
            model = self._model(model_id)
            async with self._exchange.summed(model):
                return model.step(adam)

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        await self._finish_checks()
        by_model: dict[str, list[Pass]] = {}
        for request in passes:
            if request.loss_fn != SHADOW:
                by_model.setdefault(request.model_id, []).append(request)
        async with self._locks.of_all(by_model):
            results = {model_id: iter(of_model) for model_id, of_model in (await self._run_all(by_model)).items()}
        return [
            await self._shadow(request) if request.loss_fn == SHADOW else next(results[request.model_id])
            for request in passes
        ]

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

    async def _saved_adapter(self, source: Path, exchange: Exchange) -> TrainableAdapter:
        """The adapter in a folder, without its moments; the next forks of it read no file.

        What the ranks of an exchange read together is kept apart, so that all of them hold the same.
        """
        saved = self._saved.setdefault(exchange, OrderedDict())
        if source not in saved:
            saved[source] = self._adapter(*await exchange.read(lambda: read_saved(source, self._base)))
        saved.move_to_end(source)
        while len(saved) > MAX_SAVED:
            saved.popitem(last=False)
        return saved[source]

    def _adapter(self, layout: AdapterLayout, flat: Tensor) -> TrainableAdapter:
        return TrainableAdapter(layout, flat.to(self._base.device), self._base.dtype)

    async def _run_all(self, passes: Mapping[str, Sequence[Pass]]) -> dict[str, list[PassResult | TinsmithError]]:
        """Run each model's passes together; if they may not be packed, or if that fails, one by one."""
        results: dict[str, list[PassResult | TinsmithError]] = {}
        if self._packs_requests:
            for model_id, outcome in (await self._attempt(passes, alone=False)).items():
                if not isinstance(outcome, Exception):  # of one of the passes, or of another run of a micro-batch
                    results[model_id] = [*outcome]
        left = {model_id: of_model for model_id, of_model in passes.items() if model_id not in results}
        results.update((model_id, []) for model_id in left)
        for index in range(max(map(len, left.values()), default=0)):
            requests = {model_id: of_model[index : index + 1] for model_id, of_model in left.items()}
            requests = {model_id: request for model_id, request in requests.items() if request}
            for model_id, outcome in (await self._attempt(requests, alone=True)).items():
                results[model_id] += [_failure(outcome)] if isinstance(outcome, Exception) else outcome
        return results

    async def _attempt(
        self, passes: Mapping[str, Sequence[Pass]], *, alone: bool
    ) -> dict[str, list[PassResult] | Exception]:
        """Run passes of each model; returns the results of each model or an error.

        With `alone`, each model's rows are in micro-batches of their own, so that an error is the fault of its passes.
        """
        outcomes: dict[str, list[PassResult] | Exception] = {}
        rows: dict[str, RunRows] = {}
        jobs: dict[str, Job] = {}
        for model_id, of_model in passes.items():
            with _caught(outcomes, model_id):
                rows[model_id] = RunRows.of(of_model, self._base.card.router, self._base.card.original_context)
        for model_id, shares in self._exchange.shares(rows).items():
            with _caught(outcomes, model_id):
                jobs[model_id] = self._job(self._model(model_id), passes[model_id], shares, alone=alone)
        try:
            runs = [run for job in jobs.values() for run in job.runs]
            await self._queue.compute(runs)
            check_gradients(runs)
            settled = await self._exchange.settle([*jobs.values()])
        except BaseException:
            for job in jobs.values():
                job.discard()
            raise
        for (model_id, job), outcome in zip(jobs.items(), settled, strict=True):
            job.discard() if isinstance(outcome, Exception) else job.accept()
            outcomes[model_id] = outcome
        return outcomes

    def _job(self, model: TrainableAdapter, passes: Sequence[Pass], shares: Sequence[RunRows], *, alone: bool) -> Job:
        """Runs of a model's passes: for each share of their rows, one for each thread that computes some of it."""
        runs = []
        for index, share in enumerate(shares):
            parts = thread_shares(share, self._runner.at_once, self._runner.tokens, cuts=self._runner.cuts)
            # Shards' sums may not depend on each other, and no micro-batch may have rows of two threads.
            apart = alone or len(shares) > 1 or len(parts) > 1
            for part in parts:
                group = object() if apart else None
                shard = model.shard(index)
                runs.append(TrainingRun(passes, shard, self._losses, group, part.rows, part.budgets, part.sizes))
        return Job(runs)

    async def _shadow(self, request: Pass) -> PassResult | TinsmithError:
        """Run a shadow pass, on one rank only. The model is free once the pass has its weights."""
        try:
            if self._exchange.lockstep:
                raise Unsupported("Shadow passes do not work with shard.", "Serve the model without shard.")
            if not self._exchange.leads:
                raise EngineError("A shadow pass runs on the rank that leads.")
            async with self._locks.of(request.model_id):
                start = await self._shadow_start(request)
            background = Background(self._queue.run, self._turn, self._base.dtype, self._base.card.original_context)
            return await ShadowRun(request, start, background).run()
        except Exception as error:  # noqa: BLE001 - any error is this pass's fault
            return _failure(error)

    async def _shadow_start(self, request: Pass) -> ShadowStart:
        """The adapter that a shadow pass starts from, which later steps and loads do not change."""
        folder = None if request.start is None else folder_of(request.start)
        if folder is None:
            model = self._model(request.model_id)
        else:
            model = await self._saved_adapter(folder, ALONE)
        if shadow_settings(request).optimizer != "adam_inherit":
            return ShadowStart(model.capture(), None)
        moments = model.moments().copy() if folder is None else peft.read_moments(folder, model.layout)
        return ShadowStart(model.capture(), moments)

    async def _finish_checks(self) -> None:
        """Run the checks of gradients before the first one is computed. The device is not given to samples before,
        which would leave no processor time to what compiles their functions."""
        checks = self._base.checks
        if checks.compilation is not None:
            async with self._turn():
                if checks.compilation is not None:  # no other pass has finished them
                    await asyncio.to_thread(checks.compilation.wait, gradients=True)
                    checks.finish()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Training's turn on the device."""
        async with self._device_lock, self._scheduler.turn("training"):
            yield


@contextmanager
def _caught(outcomes: MutableMapping[str, list[PassResult] | Exception], model_id: str) -> Iterator[None]:
    """Make an error within the context the outcome of a model's passes."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - any error is that of the passes
        outcomes[model_id] = error


def _failure(error: Exception) -> TinsmithError:
    return error if isinstance(error, TinsmithError) else EngineError(f"The pass failed: {error!r}")
