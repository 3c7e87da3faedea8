"""Sampling requests: straight to the engine, many at once, never behind training. Their results live in memory alone.

When the engine dies, samples in flight answer 410, and the client submits them again under a new number.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from tinsmith.engine.base import Engine, Heard, Sampled, SampleRequest
from tinsmith.errors import EngineDied, EngineError, Gone, TinsmithError
from tinsmith.service.asample import Ask
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.futures import Futures
from tinsmith.service.records import JSON, PROTOBUF, Answer, Checkpoint, Model, Sampler
from tinsmith.service.store import Store
from tinsmith.service.wire import encode_sampled
from tinsmith.service.worker import Worker

log = logging.getLogger(__name__)

LOST = Answer(status=410, media=JSON, body=b'{"detail": "This sample was lost with its engine. Submit it again."}')


class Sampling:
    """Requests in flight over all engines."""

    def __init__(self, store: Store, futures: Futures, checkpoints: Checkpoints, workers: Mapping[str, Worker]) -> None:
        self._store = store
        self._futures = futures
        self._checkpoints = checkpoints
        self._workers = workers
        self._running: dict[str, asyncio.Task[None] | asyncio.Task[Sampled]] = {}

    def submit(self, sampler: Sampler, ask: Ask, request_id: str) -> None:
        """Begin, unless the same request was submitted before."""
        if not self._futures.open(request_id, sampler.owner, stored=False):
            return
        request = replace(ask.request, request_id=request_id, version=sampler.version)
        task = asyncio.create_task(self._run(sampler, replace(ask, request=request)))
        self._running[request_id] = task
        task.add_done_callback(lambda _: self._running.pop(request_id, None))

    def begin(self, base_model: str, request: SampleRequest, heard: Heard | None = None) -> asyncio.Task[Sampled]:
        """For who waits by itself: no promise is kept. Cancelling the task stops the engine's work."""
        task = asyncio.create_task(self._sample(self._workers[base_model], request, heard))
        self._running[request.request_id] = task
        task.add_done_callback(lambda _: self._running.pop(request.request_id, None))
        return task

    async def cancel(self, sampler: Sampler, request_id: str) -> None:
        """Stop the work; the future fails."""
        task = self._running.get(request_id)
        if task is None:
            return
        self._futures.keep(request_id, Answer.failure(Gone(f"Request {request_id} was cancelled.")))
        host = self._workers[sampler.base_model].host
        if host.is_up:
            await host.engine.cancel(request_id)
        task.cancel()

    async def close(self) -> None:
        """Abandon what runs."""
        for task in list(self._running.values()):
            task.cancel()

    async def _run(self, sampler: Sampler, ask: Ask) -> None:
        request = ask.request
        try:
            sampled = await self._sample(self._workers[sampler.base_model], request)
            answer = Answer(body=encode_sampled(sampled, ask.layout), media=PROTOBUF)
        except EngineDied:
            answer = LOST
        except TinsmithError as error:
            answer = Answer.failure(error)
        except Exception as error:  # a fault of ours fails this request alone
            log.exception("Sampling request %s failed.", request.request_id)
            answer = Answer.failure(EngineError(f"Internal error: {type(error).__name__}."))
        self._futures.keep(request.request_id, answer)

    async def _sample(self, worker: Worker, request: SampleRequest, heard: Heard | None = None) -> Sampled:
        try:
            return await self._sample_known(worker, request, heard)
        except asyncio.CancelledError:
            with suppress(TinsmithError):
                await worker.host.engine.cancel(request.request_id)
            raise

    async def _sample_known(self, worker: Worker, request: SampleRequest, heard: Heard | None) -> Sampled:
        engine = await self._engine_with(worker, request.version)
        try:
            return await engine.sample(request, heard)
        except Gone:
            if request.version is None or request.version not in worker.host.known:
                raise
        worker.host.known.discard(request.version)  # it left the engine's memory: its folder is still here
        engine = await self._engine_with(worker, request.version)
        return await engine.sample(request, heard)

    async def _engine_with(self, worker: Worker, version: str | None) -> Engine:
        """The living engine, once it knows the version."""
        host = worker.host
        engine = await host.live()
        if version is None or version in host.known:
            return engine
        checkpoint = self._store.find(Checkpoint, version)
        if checkpoint is None:
            raise Gone("The weights of this sampling session were deleted.", "Create another.")
        if checkpoint.ready:
            await host.attach(version, self._checkpoints.folder(version))
        else:
            model = self._store.find(Model, checkpoint.run)
            if model is None or model.state != "live":
                raise Gone("The weights of this sampling session were lost.", "Create another.")
            await worker.revived(model)
        return host.engine
