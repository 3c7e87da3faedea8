"""The base models that a server serves: those of its settings, and those loaded and unloaded while it runs.

Each source has one engine, whatever number of names it is served under. Changes are made one at a time, and stored in
the data folder: a restart serves the same models. Unloading loses nothing: models in training are restored, and
requests that wait are run, when their base model is loaded again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tinsmith.atomic import atomic_write
from tinsmith.engine.base import ModelCard
from tinsmith.engine.validation import did_you_mean
from tinsmith.errors import BadRequest, EngineError, NotFound, TinsmithError
from tinsmith.service.concurrency import restart_on_error
from tinsmith.service.storage.records import Model
from tinsmith.service.storage.store import Store
from tinsmith.service.training.worker import Worker

log = logging.getLogger(__name__)

UNLOAD_S = 30.0
"""Time for the running batch of a base model that is unloaded; later requests wait until it is loaded again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """A loaded model in short."""

    arch: str
    dtype: str
    device: str
    path: str
    """`fast` or `general`."""
    general_path_fault: str
    """Why a model of an architecture that the fast path supports takes the general path; empty for all others."""
    weight_bytes: int
    context_limit: str
    """Why the context length is shorter than the model's own maximum; empty if it is not."""
    adapted_modules: Mapping[str, Sequence[str]]
    """Names of the modules that adapters reach by part: attn, mlp, unembed."""
    images: bool
    """Whether it takes images."""
    parameters_per_rank: Mapping[str, int]
    """Parameters of an adapter of rank 1 by part: attn, mlp, unembed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelStatus:
    """One served name."""

    name: str
    source: str
    state: Literal["loading", "up", "stalled", "restarting", "stopped", "failed"]
    error: str = ""
    model: ModelSummary | None = None
    """Of one that is or was loaded."""


class BaseModels:
    """The served base models of one server."""

    def __init__(self, store: Store, data: Path, make_worker: Callable[[str, list[str]], Worker]) -> None:
        """`make_worker(source, names)` makes the worker of a source, whose engine is not started yet."""
        self.workers: dict[str, Worker] = {}
        """Worker of each base model, by served name."""
        self._store = store
        self._file = data / "base-models.json"
        self._configured: dict[str, str] = {}
        self._make_worker = make_worker
        self._failed: dict[str, BaseModelStatus] = {}
        self._loading: dict[str, str] = {}
        """Source by name, of models that are being loaded while the server runs."""
        self._unloading: set[str] = set()
        """Names whose unloading was accepted and has not ended."""
        self._loops: dict[int, asyncio.Task[None]] = {}
        """By the worker's identity."""
        self._changes: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    # The start and the end of the server.

    def configure(self, sources: Mapping[str, str]) -> None:
        """Take the models of the settings, source by name, with the changes of earlier servers on this data folder."""
        self._configured = dict(sources)
        for name, source in self._with_stored_changes().items():
            worker = self._worker_of(source)
            if worker is None:
                worker = self._make_worker(source, [name])
            else:
                worker.host.names.append(name)
            self.workers[name] = worker

    async def start(self) -> None:
        """Load all configured models. One that fails leaves the others serving; raises its error if none is loaded."""
        workers = self.distinct_workers()
        outcomes = await asyncio.gather(*(worker.host.start() for worker in workers), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if len(errors) == len(workers):
            raise _as_tinsmith_error(errors[0])
        for worker, outcome in zip(workers, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                await self._leave_out(worker, outcome)
            else:
                self._run(worker)

    async def close(self) -> None:
        """Stop the loops; the engines stop with their hosts."""
        tasks = [*self._changes, *self._loops.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers = self.distinct_workers()
        await asyncio.gather(*(worker.close() for worker in workers))
        await asyncio.gather(*(worker.host.close() for worker in workers))

    # Queries.

    def distinct_workers(self) -> list[Worker]:
        """Each worker once: several names may share one."""
        return list({id(worker): worker for worker in self.workers.values()}.values())

    async def release_memory(self) -> None:
        """Let all running engines give back what they keep for speed only: another one needs the device's memory."""
        await asyncio.gather(*(worker.host.release_memory() for worker in self.distinct_workers()))

    def status(self) -> list[BaseModelStatus]:
        """All names: served, loading, or failed at their last load."""
        served = [
            BaseModelStatus(
                name=name,
                source=worker.host.config.source,
                state=worker.host.state,
                error=self._failed[name].error if name in self._failed else "",
                model=_summary(worker.host.latest_card),
            )
            for name, worker in self.workers.items()
        ]
        loading = [BaseModelStatus(name=name, source=source, state="loading") for name, source in self._loading.items()]
        failed = [status for name, status in self._failed.items() if name not in self.workers]
        return [*served, *loading, *failed]

    # Changes.

    def load(self, name: str, source: str, *, replace: bool = False) -> None:
        """Begin to load a base model under a name; `status` tells when it is served.

        With `replace`, a model that is served under the name is unloaded first, and loaded again if the new one cannot
        be. Raises BadRequest if the name is taken.
        """
        worker = self.workers.get(name)
        if name in self._loading or (worker is not None and not replace and name not in self._unloading):
            loading = self._loading.get(name) or (worker.host.config.source if worker is not None else "")
            raise BadRequest(f"{name} is served from {loading}.", "Unload it first, or replace it.")
        self._failed.pop(name, None)
        self._loading[name] = source
        self._change(self._load(name, source))

    def unload(self, name: str) -> None:
        """Begin to unload a base model. Raises NotFound, or BadRequest if no other would stay.

        Models that are being loaded do not count: their load may fail.
        """
        self._failed.pop(name, None)
        if name not in self.workers:
            raise NotFound(f"Base model {name} is not served here.", did_you_mean(name, self.workers))
        if name in self._unloading:
            raise BadRequest(f"{name} is being unloaded already.", "Wait until it is gone.")
        if not self.workers.keys() - self._unloading - {name}:
            raise BadRequest(
                f"{name} is the only base model.", "Load another first and wait until it is served, or stop the server."
            )
        self._unloading.add(name)
        self._change(self._unload_and_store(name))

    def _change(self, change: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            async with self._lock:
                await change

        task = asyncio.create_task(run())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _load(self, name: str, source: str) -> None:
        replaced = self.workers[name].host.config.source if name in self.workers else None
        try:
            if replaced is not None:
                await self._unload(name)
            if not await self._serve(name, source) and replaced is not None:
                await self._serve(name, replaced)
        finally:
            self._loading.pop(name, None)

    async def _serve(self, name: str, source: str) -> bool:
        """Serve a source under a name; False if it cannot be loaded, which leaves the other models serving."""
        try:
            worker = self._worker_of(source)
            if worker is None:
                worker = self._make_worker(source, [name])
                await worker.host.start()
                self._run(worker)
            else:
                worker.host.names.append(name)
            await self._take_over(name, worker)
            self.workers[name] = worker
            self._store_changes()
            log.info("%s is served from %s.", name, source)
        except Exception as error:
            expected = isinstance(error, TinsmithError | OSError | ValueError)
            log.error("%s cannot be loaded from %s: %s", name, source, error, exc_info=not expected)
            self._failed[name] = BaseModelStatus(name=name, source=source, state="failed", error=str(error))
            return False
        return True

    async def _take_over(self, name: str, worker: Worker) -> None:
        """Queue the requests that wait for this base model."""
        seqs, pending = await self._store.highest_seqs(), await self._store.pending_requests()
        models = {model.id for model in self._store.all(Model) if model.base_model == name}
        worker.recover(
            {model: seq for model, seq in seqs.items() if model in models},
            [request for request in pending if request.model_id in models],
        )

    async def _unload_and_store(self, name: str) -> None:
        try:
            await self._unload(name)
        finally:
            self._unloading.discard(name)
        self._store_changes()
        log.info("%s is not served any more.", name)

    async def _unload(self, name: str) -> None:
        worker = self.workers.pop(name)
        if worker in self.workers.values():
            worker.host.names.remove(name)  # its models in training become idle, and leave the engine as idle models do
            return
        try:
            async with asyncio.timeout(UNLOAD_S):
                await worker.drain()
        except TimeoutError:
            log.warning("The running batch of %s takes longer than %.0f s; it runs again later.", name, UNLOAD_S)
        loop = self._loops.pop(id(worker))
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await worker.close()
        await worker.host.close()

    # Workers.

    def _worker_of(self, source: str) -> Worker | None:
        """The worker whose engine has loaded this source."""
        return next((worker for worker in self.workers.values() if worker.host.config.source == source), None)

    def _run(self, worker: Worker) -> None:
        self._loops[id(worker)] = asyncio.create_task(restart_on_error(worker.run))

    async def _leave_out(self, worker: Worker, error: BaseException) -> None:
        """Leave out a configured model that could not be loaded."""
        source = worker.host.config.source
        log.error("%s cannot be loaded, the other models are served: %s", source, error)
        for name in [name for name, served in self.workers.items() if served is worker]:
            del self.workers[name]
            self._failed[name] = BaseModelStatus(name=name, source=source, state="failed", error=str(error))
        await worker.host.close()

    # Changes of earlier servers.

    def _with_stored_changes(self) -> dict[str, str]:
        """Source by name: the settings, with what was loaded and unloaded since they were given."""
        if not self._file.is_file():
            return dict(self._configured)
        changes = json.loads(self._file.read_text())
        remaining = {name: source for name, source in self._configured.items() if name not in changes["unloaded"]}
        return {**remaining, **changes["loaded"]}

    def _store_changes(self) -> None:
        served = {name: worker.host.config.source for name, worker in self.workers.items()}
        loaded = {name: source for name, source in served.items() if self._configured.get(name) != source}
        unloaded = [name for name in self._configured if name not in served and name not in self._failed]
        atomic_write(self._file, json.dumps({"loaded": loaded, "unloaded": unloaded}).encode())


def _summary(card: ModelCard | None) -> ModelSummary | None:
    if card is None:
        return None
    return ModelSummary(
        arch=card.arch,
        dtype=card.dtype,
        device=card.device,
        path=card.path,
        general_path_fault=card.general_path_fault,
        weight_bytes=card.weight_bytes,
        context_limit=card.context_limit,
        adapted_modules=dict(card.adapted_modules),
        images=card.images is not None,
        parameters_per_rank=dict(card.parameters_per_rank),
    )


def _as_tinsmith_error(error: BaseException) -> TinsmithError:
    """The error of a start; any other than the engine's own is named with its type."""
    if isinstance(error, TinsmithError):
        return error
    return EngineError(f"An engine did not start: {type(error).__name__}: {error}")
