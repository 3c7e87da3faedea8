"""A service behind a port, until a signal ends it.

The port opens at once. `GET /api/v1/healthz` answers 503 until every engine is loaded, then 200; requests that need a
loading engine wait for it. An engine that cannot be loaded at the start ends the server with its error.
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
from tinsmith.service.storage.store import Store, exclusive_store
from tinsmith.service.tenancy.keys import Tenants
from tinsmith.service.tenancy.quotas import QuotaEnforcer
from tinsmith.service.tenancy.signing import load_signer
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.worker import Worker
from tinsmith.settings import writable_folder

log = logging.getLogger(__name__)


@asynccontextmanager
async def running(
    config: ServeConfig, start: EngineFactory, on_end: Callable[[TinsmithError | None], None]
) -> AsyncIterator[Service]:
    """The parts at work. `on_end` hears of the engines' start: None when all are loaded, else why one is not.

    Raises ConfigError if the data folder cannot be written, or another server uses it or the database.
    """
    with _alone(writable_folder(config.data, "--data")):
        async with exclusive_store(config.data, config.database) as store, tracing(config.otlp_endpoint) as spans:
            service = _assemble(config, store, start, spans)
            await _open_to_someone(service)
            await _take_up(service)
            async with _at_work(service, on_end):
                yield service


@asynccontextmanager
async def _at_work(service: Service, on_end: Callable[[TinsmithError | None], None]) -> AsyncIterator[None]:
    """Engines and loops run inside; afterwards all of them have ended."""
    workers = _distinct_workers(service)
    tasks = [asyncio.create_task(_work(workers, on_end)), asyncio.create_task(_for_ever(service.sessions.run))]
    tasks.append(asyncio.create_task(_for_ever(service.tenants.run)))
    tasks.append(asyncio.create_task(_for_ever(service.audit_log.run)))
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


def _assemble(config: ServeConfig, store: Store, start: EngineFactory, spans: SpanExporter | None) -> Service:
    key, made = server_key(config)
    if made:
        log.info('Made a key. To use it: export TINKER_API_KEY="$(cat %s)"', config.data / "api-key")
    promises = Futures(config.hold_s, config.retention_s, UnfinishedSamples(config.data / "samples"))
    saved = Checkpoints(store, config.data / "checkpoints")
    tenants = Tenants(store.database, key)
    quotas = QuotaEnforcer(tenants, store, promises)
    journal = Journal(store, config.data / "journal", config.capture_every)
    audit_log = AuditLog(store)
    workers: dict[str, Worker] = {}
    hosts: list[EngineHost] = []
    telemetry = Telemetry(lambda: [*record_gauges(store), *engine_gauges(hosts)], _hears(audit_log, spans))
    for source, names in config.sources().items():
        host = EngineHost(config.engine_config(source), names, start)
        hosts.append(host)
        worker = Worker(host, store, promises, journal, saved, quotas, config.batch_tokens, telemetry, audit_log)
        workers |= dict.fromkeys(names, worker)
    samples = Sampling(store, promises, saved, quotas, workers, config.queued_samples, telemetry)
    cleanup = SessionCleanup(store, saved, journal, promises, workers)
    return Service(
        config=config,
        key=key,
        tenants=tenants,
        quotas=quotas,
        store=store,
        futures=promises,
        checkpoints=saved,
        journal=journal,
        sessions=Sessions(store, saved, cleanup, config.session_timeout_s, config.retention_s, audit_log),
        sampling=samples,
        signer=load_signer(config.data),
        copies=CheckpointCopies(store, saved),
        telemetry=telemetry,
        drain=Drain(workers.values(), samples),
        audit_log=audit_log,
        usage=Usage(store, audit_log),
        traces=TraceExporter(store, audit_log, config.data / "traces"),
        tokenizers=TokenizerCache(),
        workers=workers,
    )


def _hears(audit_log: AuditLog, spans: SpanExporter | None) -> Callable[[Timeline], None]:
    """Who is told of each finished request."""

    def hear(line: Timeline) -> None:
        audit_log.request_finished(line)
        if spans is not None:
            spans(line)

    return hear


async def _open_to_someone(service: Service) -> None:
    """Raises ConfigError where others could connect and nobody said by which key."""
    await service.tenants.reload()
    if service.key is None and not service.tenants.has_keys:
        what = f"host {service.config.host} can be reached from elsewhere, and there is no key for it."
        raise ConfigError(what, "Give an --api-key of your own, or make keys first: tinsmith keys create NAME.")


async def _take_up(service: Service) -> None:
    """What an earlier process promised is promised still."""
    await service.audit_log.load()
    await service.checkpoints.clean_up()
    await service.journal.clean_up()
    seqs, pending = await service.store.highest_seqs(), await service.store.pending_requests()
    for worker in _distinct_workers(service):
        worker.recover(seqs, pending)
    service.sampling.restore()


def _distinct_workers(service: Service) -> list[Worker]:
    """Each worker once: several served names may share a worker."""
    return list({id(worker): worker for worker in service.workers.values()}.values())


async def _work(workers: list[Worker], on_end: Callable[[TinsmithError | None], None]) -> None:
    try:
        await asyncio.gather(*(worker.host.start() for worker in workers))
    except TinsmithError as error:
        on_end(error)
        return
    except Exception as error:  # whatever it is, the server must not wait for ever
        log.exception("An engine did not start.")
        on_end(EngineError(f"An engine did not start: {type(error).__name__}: {error}"))
        return
    on_end(None)
    await asyncio.gather(*(_for_ever(worker.run) for worker in workers))


async def _for_ever(run: Callable[[], Awaitable[None]]) -> None:
    """A loop that ends by a fault of ours begins again: other requests must not wait for a restart."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("A loop of the service failed; it begins again.")
            await asyncio.sleep(1)


@contextmanager
def _alone(folder: Path) -> Iterator[IO[str]]:
    """Two servers on one folder would undo each other's work."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"Another server uses {folder}.", "End it, or give this one its own --data.") from error
        yield lock


DRAIN_S = 3.0
"""For passes and samples that are under way when the server is told to end."""
GRACE_S = 1
"""For answers that are under way after that."""
KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections, so that none is closed just when it is used again."""


class _Server(uvicorn.Server):
    """Ends by itself when it is told to: work under way first, then open polls, then uvicorn."""

    def __init__(self, options: uvicorn.Config, service: Service) -> None:
        super().__init__(options)
        self._service = service
        self._finishing: asyncio.Task[None] | None = None

    def told(self) -> None:
        """A signal. A second one does not wait."""
        if self._finishing is None:
            log.info("Ending: what is under way is finished.")
            self._finishing = asyncio.create_task(self._finish())
        else:
            self.force_exit = True
            self.end()

    def end(self) -> None:
        """Open polls go home, and the port closes."""
        self._service.futures.wake_waiters()
        self.should_exit = True

    async def _finish(self) -> None:
        if not await self._service.drain.run(DRAIN_S):
            log.info("What is under way takes longer than %.0f s; the next server takes it up.", DRAIN_S)
        self.end()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    config: ServeConfig, *, start: EngineFactory = start_engine, on_ready: Callable[[str, str], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. Calls `on_ready(url, key)` when models are ready.

    Raises ConfigError if the port or the folder is taken, and what an engine's start raises.
    """
    configure_logging(config.log_format, config.log_level)
    _many_files()
    asyncio.run(_serve(config, start, on_ready))


async def _serve(config: ServeConfig, start: EngineFactory, on_ready: Callable[[str, str], None] | None) -> None:
    listener = _listen(config)
    url = f"http://{config.host}:{listener.getsockname()[1]}"
    loaded: asyncio.Future[TinsmithError | None] = asyncio.get_running_loop().create_future()
    async with running(config, start, loaded.set_result) as service:
        options = uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            lifespan="off",
        )
        server = _Server(options, service)

        def tell(outcome: asyncio.Future[TinsmithError | None]) -> None:
            if outcome.cancelled() or outcome.result() is not None:
                server.end()
                return
            log.info("Ready: TINKER_BASE_URL=%s serves %s", url, ", ".join(service.workers))
            if on_ready is not None:
                on_ready(url, service.key or "")

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.told)
        log.info("Loading %s; listening on %s", ", ".join(config.sources()), url)
        loaded.add_done_callback(tell)
        await server.serve(sockets=[listener])
    if loaded.done() and not loaded.cancelled() and (error := loaded.result()) is not None:
        raise error


def _listen(config: ServeConfig) -> socket.socket:
    try:
        listener = socket.create_server((config.host, config.port), backlog=2048)
    except OSError as error:
        why = str(error.strerror).partition(" (while attempting")[0]
        taken = error.errno == errno.EADDRINUSE
        cure = (
            "Give another --port; 0 takes a free one." if taken else "Give a --host of this machine, or another --port."
        )
        raise ConfigError(f"Cannot listen on {config.host}:{config.port}: {why}.", cure) from error
    # asyncio forgets this for sockets it did not make; without it each answer waits 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _many_files() -> None:
    """Hundreds of polls are open at once; the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
