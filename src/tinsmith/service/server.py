"""The server: builds the service from its parts, recovers what an earlier process accepted, and runs until a signal.

The port opens at once. `GET /api/v1/healthz` answers 503 until every engine is loaded, then 200; requests that need a
loading engine wait for it. If an engine cannot be loaded at the start, the server ends with its error; an engine that
dies later is restarted by its worker.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO

import uvicorn
from typing_extensions import override

from tinsmith.chat.tokenizer import TokenizerCache
from tinsmith.errors import ConfigError, EngineError, TinsmithError
from tinsmith.service.app import create_app
from tinsmith.service.checkpoints import CheckpointCopies, Checkpoints
from tinsmith.service.config import ServeConfig
from tinsmith.service.dependencies import Service, server_key
from tinsmith.service.engines.host import EngineFactory, EngineHost, start_engine
from tinsmith.service.middleware import Drain
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.observability.logs import configure_logging
from tinsmith.service.observability.metrics import Telemetry, Timeline, engine_gauges, record_gauges
from tinsmith.service.observability.perfetto import TraceExporter
from tinsmith.service.observability.tracing import SpanExporter, tracing
from tinsmith.service.observability.usage import Usage
from tinsmith.service.results.futures import Futures
from tinsmith.service.results.unfinished_samples import UnfinishedSamples
from tinsmith.service.sampling import Sampling
from tinsmith.service.sessions import SessionCleanup, Sessions
from tinsmith.service.storage.records import SamplingSession
from tinsmith.service.storage.store import Store, exclusive_store
from tinsmith.service.tenancy.keys import Tenants
from tinsmith.service.tenancy.quotas import QuotaEnforcer
from tinsmith.service.tenancy.signing import load_signer
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.worker import Worker
from tinsmith.service.wire.provenance import SequenceRegistry
from tinsmith.settings import writable_folder

log = logging.getLogger(__name__)


DRAIN_S = 3.0
"""Time for running batches and samples after a signal."""
GRACE_S = 1
"""Time for open responses after the drain."""
KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections, so that the server never closes one that is about to be reused."""
RESTART_DELAY_S = 1

OnLoaded = Callable[[TinsmithError | None], None]
"""Called once: with None when all engines are loaded, else with the error of one that is not."""


def serve(
    config: ServeConfig, *, start: EngineFactory = start_engine, on_ready: Callable[[str, str], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. Calls `on_ready(url, key)` once the engines are loaded.

    Raises ConfigError if the port or the data folder is in use, and the error of an engine that does not start.
    """
    configure_logging(config.log_format, config.log_level)
    _raise_file_limit()
    asyncio.run(_serve(config, start, on_ready))


async def _serve(config: ServeConfig, start: EngineFactory, on_ready: Callable[[str, str], None] | None) -> None:
    listener = _listen(config)
    url = f"http://{config.host}:{listener.getsockname()[1]}"
    loaded: asyncio.Future[TinsmithError | None] = asyncio.get_running_loop().create_future()
    async with run_service(config, start, loaded.set_result) as service:
        options = uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            lifespan="off",
        )
        server = _Server(options, service)

        def announce(outcome: asyncio.Future[TinsmithError | None]) -> None:
            if outcome.cancelled() or outcome.result() is not None:
                server.stop()
                return
            log.info("Ready: TINKER_BASE_URL=%s serves %s", url, ", ".join(service.workers))
            if on_ready is not None:
                on_ready(url, service.key or "")

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.on_signal)
        log.info("Loading %s; listening on %s", ", ".join(config.sources()), url)
        loaded.add_done_callback(announce)
        await server.serve(sockets=[listener])
    if loaded.done() and not loaded.cancelled() and (error := loaded.result()) is not None:
        raise error


@asynccontextmanager
async def run_service(config: ServeConfig, start: EngineFactory, on_loaded: OnLoaded) -> AsyncIterator[Service]:
    """Run a service, without its port, for the duration of the block.

    Raises ConfigError if the data folder cannot be written, if another server uses it or the database, or if the server
    is reachable from other machines and there is no key.
    """
    with _lock_folder(writable_folder(config.data, "--data")):
        async with exclusive_store(config.data, config.database) as store, tracing(config.otlp_endpoint) as spans:
            service = _assemble(config, store, start, spans)
            await _require_key(service)
            await _recover(service)
            async with _running(service, on_loaded):
                yield service


def _assemble(config: ServeConfig, store: Store, start: EngineFactory, spans: SpanExporter | None) -> Service:
    key, is_new = server_key(config)
    if is_new:
        log.info('Made a key. To use it: export TINKER_API_KEY="$(cat %s)"', config.data / "api-key")
    futures = Futures(config.hold_s, config.retention_s, UnfinishedSamples(config.data / "samples"))
    checkpoints = Checkpoints(store, config.data / "checkpoints")
    tenants = Tenants(store.database, key)
    quotas = QuotaEnforcer(tenants, store, futures)
    journal = Journal(store, config.data / "journal", config.capture_every)
    audit_log = AuditLog(store)
    sequences = SequenceRegistry(lambda sampler_id: _owner_of(store, sampler_id))
    workers: dict[str, Worker] = {}
    hosts: list[EngineHost] = []
    telemetry = Telemetry(lambda: [*record_gauges(store), *engine_gauges(hosts)], _on_finished(audit_log, spans))
    for source, names in config.sources().items():
        host = EngineHost(config.engine_config(source), names, start)
        hosts.append(host)
        worker = Worker(host, store, futures, journal, checkpoints, quotas, config.batch_tokens, telemetry, audit_log)
        workers |= dict.fromkeys(names, worker)
    sampling = Sampling(store, futures, checkpoints, quotas, workers, config.queued_samples, telemetry, sequences)
    cleanup = SessionCleanup(store, checkpoints, journal, futures, workers)
    return Service(
        config=config,
        key=key,
        tenants=tenants,
        quotas=quotas,
        store=store,
        futures=futures,
        checkpoints=checkpoints,
        journal=journal,
        sessions=Sessions(store, checkpoints, cleanup, config.session_timeout_s, config.retention_s, audit_log),
        sampling=sampling,
        sequences=sequences,
        signer=load_signer(config.data),
        copies=CheckpointCopies(store, checkpoints),
        telemetry=telemetry,
        drain=Drain(workers.values(), sampling),
        audit_log=audit_log,
        usage=Usage(store, audit_log),
        traces=TraceExporter(store, audit_log, config.data / "traces"),
        tokenizers=TokenizerCache(),
        workers=workers,
    )


def _owner_of(store: Store, sampler_id: str) -> str | None:
    sampler = store.find(SamplingSession, sampler_id)
    return sampler.owner if sampler is not None else None


def _on_finished(audit_log: AuditLog, spans: SpanExporter | None) -> Callable[[Timeline], None]:
    """What happens with the timeline of each finished request."""

    def record(timeline: Timeline) -> None:
        audit_log.request_finished(timeline)
        if spans is not None:
            spans(timeline)

    return record


async def _require_key(service: Service) -> None:
    await service.tenants.reload()
    if service.key is None and not service.tenants.has_keys:
        raise ConfigError(
            f"host {service.config.host} is reachable from other machines, and there is no key for it.",
            "Give an --api-key of your own, or make keys first: tinsmith keys create NAME.",
        )


async def _recover(service: Service) -> None:
    """Take over what an earlier process accepted."""
    await service.audit_log.load()
    await service.checkpoints.clean_up()
    await service.journal.clean_up()
    seqs, pending = await service.store.highest_seqs(), await service.store.pending_requests()
    for worker in _distinct_workers(service):
        worker.recover(seqs, pending)
    service.sampling.restore()


@asynccontextmanager
async def _running(service: Service, on_loaded: OnLoaded) -> AsyncIterator[None]:
    """Run engines and loops for the duration of the block; all of them have ended after it."""
    workers = _distinct_workers(service)
    tasks = [
        asyncio.create_task(_run_workers(workers, on_loaded)),
        asyncio.create_task(_restart_on_error(service.sessions.run)),
        asyncio.create_task(_restart_on_error(service.tenants.run)),
        asyncio.create_task(_restart_on_error(service.audit_log.run)),
    ]
    try:
        yield
    finally:
        service.futures.wake_waiters()
        await service.sampling.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in workers))
        await asyncio.gather(*(worker.host.stop() for worker in workers))
        service.futures.close()
        await service.audit_log.flush()


def _distinct_workers(service: Service) -> list[Worker]:
    """Each worker once: several served names may share a worker."""
    return list({id(worker): worker for worker in service.workers.values()}.values())


async def _run_workers(workers: list[Worker], on_loaded: OnLoaded) -> None:
    try:
        await asyncio.gather(*(worker.host.start() for worker in workers))
    except TinsmithError as error:
        on_loaded(error)
        return
    except Exception as error:  # any other error must end the server too, which waits for `on_loaded`
        log.exception("An engine did not start.")
        on_loaded(EngineError(f"An engine did not start: {type(error).__name__}: {error}"))
        return
    on_loaded(None)
    await asyncio.gather(*(_restart_on_error(worker.run) for worker in workers))


async def _restart_on_error(run: Callable[[], Awaitable[None]]) -> None:
    """Run a loop again after a bug has ended it: other requests must not wait for a restart of the server."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("A loop of the service failed; restarting it.")
            await asyncio.sleep(RESTART_DELAY_S)


class _Server(uvicorn.Server):
    """Stops in order: running work first, then open polls, then uvicorn."""

    def __init__(self, options: uvicorn.Config, service: Service) -> None:
        super().__init__(options)
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        """Stop after running work; a second signal stops at once."""
        if self._draining is None:
            log.info("Stopping: finishing what is running.")
            self._draining = asyncio.create_task(self._drain())
        else:
            self.force_exit = True
            self.stop()

    def stop(self) -> None:
        """Answer open polls and close the port."""
        self._service.futures.wake_waiters()
        self.should_exit = True

    async def _drain(self) -> None:
        if not await self._service.drain.run(DRAIN_S):
            log.info("Running work takes longer than %.0f s; the next server continues it.", DRAIN_S)
        self.stop()

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _lock_folder(folder: Path) -> Iterator[IO[str]]:
    """Keep other servers off a data folder. Raises ConfigError if one uses it."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"Another server uses {folder}.", "End it, or give this one its own --data.") from error
        yield lock


def _listen(config: ServeConfig) -> socket.socket:
    try:
        listener = socket.create_server((config.host, config.port), backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (while attempting")[0]
        raise ConfigError(
            f"Cannot listen on {config.host}:{config.port}: {reason}.",
            "Give another --port; 0 takes a free one."
            if error.errno == errno.EADDRINUSE
            else "Give a --host of this machine, or another --port.",
        ) from error
    # asyncio sets this only for sockets it makes; without it each response waits 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _raise_file_limit() -> None:
    """Allow 65536 open files: hundreds of polls are open at once, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
