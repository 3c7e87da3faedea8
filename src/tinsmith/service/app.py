"""The app: its parts put together, its errors turned into answers, and how it is served until a signal ends it.

The port opens at once. `GET /api/v1/healthz` answers 503 until every engine is loaded, then 200; requests that need a
loading engine wait for it. An engine that cannot be loaded at start ends the server with its error.
"""

from __future__ import annotations

import asyncio
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
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tinsmith.errors import Busy, ConfigError, EngineError, TinsmithError
from tinsmith.service.bodies import sentence
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.chronicle import Chronicle
from tinsmith.service.config import ServeConfig
from tinsmith.service.copies import Copies
from tinsmith.service.deps import Service, key_of
from tinsmith.service.dialect import ROUTERS
from tinsmith.service.engines import EngineHost, Start, start_engine
from tinsmith.service.futures import Futures
from tinsmith.service.gate import Drain, Gate, route_of
from tinsmith.service.gauges import engines, held
from tinsmith.service.journal import Journal
from tinsmith.service.ledger import Ledger
from tinsmith.service.limits import Limits
from tinsmith.service.logs import log_to_console
from tinsmith.service.openai_errors import is_theirs, shape_of, shaped
from tinsmith.service.records import Model, Session
from tinsmith.service.routes import (
    admin,
    checkpoints,
    files,
    futures,
    losses,
    manage,
    metrics,
    older,
    runs,
    sampling,
    sessions,
    training,
)
from tinsmith.service.sampling import Sampling
from tinsmith.service.sessions import Sessions
from tinsmith.service.signing import signer_of
from tinsmith.service.spans import Spans, tracing
from tinsmith.service.store import Store, served_store
from tinsmith.service.telemetry import Telemetry, Timeline
from tinsmith.service.tenants import Tenants
from tinsmith.service.texts import Texts
from tinsmith.service.traces import Traces
from tinsmith.service.usage import Usage
from tinsmith.service.worker import Worker

log = logging.getLogger(__name__)

DRAIN_S = 3.0
"""For passes and samples that are under way when the server is told to end."""
GRACE_S = 1
"""For answers that are under way after that."""
KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections, so that none is closed just when it is used again."""


def create_app(service: Service) -> FastAPI:
    """The whole API over a running service."""
    app = FastAPI(title="Tinsmith", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    # The busiest first.
    for module in (futures, sampling, training, losses, sessions, runs, checkpoints, manage, files, admin, older):
        app.include_router(module.router, prefix="/api/v1")
    app.include_router(metrics.router)
    app.add_middleware(Gate, telemetry=service.telemetry, drain=service.drain)
    for prefix, router in ROUTERS:
        app.include_router(router, prefix=prefix)
    app.add_exception_handler(TinsmithError, _of_ours)
    app.add_exception_handler(HTTPException, _of_routing)
    app.add_exception_handler(RequestValidationError, _of_parameters)
    return app


@asynccontextmanager
async def running(
    config: ServeConfig, start: Start, on_end: Callable[[TinsmithError | None], None]
) -> AsyncIterator[Service]:
    """The parts at work. `on_end` hears of the engines' start: None when all are loaded, else why one is not.

    Raises ConfigError if another server uses the data folder or the database.
    """
    config.data.mkdir(parents=True, exist_ok=True)
    with _alone(config.data):
        async with served_store(config.data, config.database) as store, tracing(config.otlp_endpoint) as spans:
            service = _assemble(config, store, start, spans)
            await _open_to_someone(service)
            await _take_up(service)
            async with _at_work(service, on_end):
                yield service


@asynccontextmanager
async def _at_work(service: Service, on_end: Callable[[TinsmithError | None], None]) -> AsyncIterator[None]:
    """Engines and loops run inside; afterwards all of them have ended."""
    workers = list({id(worker): worker for worker in service.workers.values()}.values())
    tasks = [asyncio.create_task(_work(workers, on_end)), asyncio.create_task(_for_ever(service.sessions.run))]
    tasks.append(asyncio.create_task(_for_ever(service.tenants.run)))
    tasks.append(asyncio.create_task(_for_ever(service.chronicle.run)))
    try:
        yield
    finally:
        service.futures.close()
        await service.sampling.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in workers))
        await asyncio.gather(*(worker.host.down() for worker in workers))
        service.futures.shut()
        await service.chronicle.flush()


def _assemble(config: ServeConfig, store: Store, start: Start, spans: Spans | None) -> Service:
    key, made = key_of(config)
    if made:
        log.info('Made a key. To use it: export TINKER_API_KEY="$(cat %s)"', config.data / "api-key")
    promises = Futures(config.hold_s, config.retention_s, Ledger(config.data / "samples"))
    saved = Checkpoints(store, config.data / "checkpoints")
    tenants = Tenants(store.database, key)
    limits = Limits(tenants, store, promises)
    journal = Journal(store, config.data / "journal", config.capture_every)
    chronicle = Chronicle(store)
    workers: dict[str, Worker] = {}
    hosts: list[EngineHost] = []
    telemetry = Telemetry(lambda: [*held(store), *engines(hosts)], _hears(chronicle, spans))
    for source, names in config.sources().items():
        host = EngineHost(config.engine_config(source), names, start)
        hosts.append(host)
        worker = Worker(host, store, promises, journal, saved, limits, config.batch_tokens, telemetry, chronicle)
        workers |= dict.fromkeys(names, worker)
    samples = Sampling(store, promises, saved, limits, workers, config.queued_samples, telemetry)
    return Service(
        config=config,
        key=key,
        tenants=tenants,
        limits=limits,
        store=store,
        futures=promises,
        checkpoints=saved,
        journal=journal,
        sessions=Sessions(store, saved, workers, config.session_timeout_s, config.retention_s, chronicle),
        sampling=samples,
        signer=signer_of(config.data),
        copies=Copies(store, saved),
        telemetry=telemetry,
        drain=Drain(workers.values(), samples),
        chronicle=chronicle,
        usage=Usage(store, chronicle),
        traces=Traces(store, chronicle, config.data / "traces"),
        texts=Texts(),
        workers=workers,
    )


def _hears(chronicle: Chronicle, spans: Spans | None) -> Callable[[Timeline], None]:
    """Who is told of each finished request."""

    def hear(line: Timeline) -> None:
        chronicle.request(line)
        if spans is not None:
            spans(line)

    return hear


async def _open_to_someone(service: Service) -> None:
    """Raises ConfigError where others could connect and nobody said by which key."""
    await service.tenants.read()
    if service.key is None and not service.tenants.has_keys:
        what = f"host {service.config.host} can be reached from elsewhere, and there is no key for it."
        raise ConfigError(what, "Give an --api-key of your own, or make keys first: tinsmith keys create NAME.")


async def _take_up(service: Service) -> None:
    """What an earlier process promised is promised still."""
    await service.chronicle.load()
    await service.checkpoints.sweep()
    await service.journal.sweep()
    for model_id, (accepted, finished) in (await service.store.highest()).items():
        model = service.store.find(Model, model_id)
        worker = service.workers.get(model.base_model) if model else None
        if worker is not None:
            line = worker.line(model_id)
            line.accepted, line.begun = accepted, finished
    for row in await service.store.pending():
        model = service.store.find(Model, row.model_id)
        worker = service.workers.get(model.base_model) if model else None
        if worker is not None:
            service.futures.open(row.id, row.owner, stored=True)
            worker.add(row)
    service.sampling.take_up()
    for model in service.store.all(Model):
        session, worker = service.store.find(Session, model.session_id), service.workers.get(model.base_model)
        if worker is not None and model.state != "ended" and (session is None or session.ended is not None):
            worker.drop(model)


async def _work(workers: list[Worker], on_end: Callable[[TinsmithError | None], None]) -> None:
    try:
        await asyncio.gather(*(worker.host.up() for worker in workers))
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


async def _of_ours(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TinsmithError)
    log.info("%s %s refused with %d: %s", request.method, route_of(request.scope), error.status, error)
    headers = {"retry-after-ms": str(error.retry_after_ms)} if isinstance(error, Busy) else None
    if error.status == 401:
        headers = {"WWW-Authenticate": 'ApiKey error="invalid_token"'}  # exchange it anew
    told = {"detail": str(error), "category": error.category}
    return JSONResponse(shape_of(error) if is_theirs(request.url.path) else told, error.status, headers)


async def _of_routing(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path} is not served here: {error.detail}."
    told = shaped(detail, error.status_code, "not_served") if is_theirs(request.url.path) else {"detail": detail}
    return JSONResponse(told, status_code=error.status_code)


async def _of_parameters(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": sentence(error.errors())}, status_code=400)


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
        self._service.futures.close()
        self.should_exit = True

    async def _finish(self) -> None:
        if not await self._service.drain.run(DRAIN_S):
            log.info("What is under way takes longer than %.0f s; the next server takes it up.", DRAIN_S)
        self.end()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    config: ServeConfig, *, start: Start = start_engine, on_ready: Callable[[str, str], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. Calls `on_ready(url, key)` when models are ready.

    Raises ConfigError if the port or the folder is taken, and what an engine's start raises.
    """
    log_to_console(config.log_format, config.log_level)
    _many_files()
    asyncio.run(_serve(config, start, on_ready))


async def _serve(config: ServeConfig, start: Start, on_ready: Callable[[str, str], None] | None) -> None:
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
        raise ConfigError(
            f"Cannot listen on {config.host}:{config.port}: {error}.", "Give another --port; 0 takes a free one."
        ) from error
    # asyncio forgets this for sockets it did not make; without it each answer waits 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _many_files() -> None:
    """Hundreds of polls are open at once; the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
