"""A service's parts put together and at work: what an earlier process promised is taken up, engines and loops run.

An engine that cannot be loaded at the start is told to the caller; one that dies later is started again by its worker.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO

from tinsmith.errors import ConfigError, EngineError, TinsmithError
from tinsmith.service.checkpoints import Checkpoints
from tinsmith.service.config import ServeConfig
from tinsmith.service.copies import Copies
from tinsmith.service.deps import Service, key_of
from tinsmith.service.engines import EngineHost, Start
from tinsmith.service.futures import Futures
from tinsmith.service.gate import Drain
from tinsmith.service.journal import Journal
from tinsmith.service.ledger import Ledger
from tinsmith.service.limits import Limits
from tinsmith.service.observe.chronicle import Chronicle
from tinsmith.service.observe.gauges import engines, held
from tinsmith.service.observe.spans import Spans, tracing
from tinsmith.service.observe.telemetry import Telemetry, Timeline
from tinsmith.service.observe.traces import Traces
from tinsmith.service.observe.usage import Usage
from tinsmith.service.openai.texts import Texts
from tinsmith.service.records import Model
from tinsmith.service.remains import Remains
from tinsmith.service.sampling import Sampling
from tinsmith.service.sessions import Sessions
from tinsmith.service.signing import signer_of
from tinsmith.service.store import Store, served_store
from tinsmith.service.tenants import Tenants
from tinsmith.service.worker import Worker
from tinsmith.settings import made

log = logging.getLogger(__name__)


@asynccontextmanager
async def running(
    config: ServeConfig, start: Start, on_end: Callable[[TinsmithError | None], None]
) -> AsyncIterator[Service]:
    """The parts at work. `on_end` hears of the engines' start: None when all are loaded, else why one is not.

    Raises ConfigError if the data folder cannot be written, or another server uses it or the database.
    """
    with _alone(made(config.data, "--data")):
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
    remains = Remains(store, saved, journal, promises, workers)
    return Service(
        config=config,
        key=key,
        tenants=tenants,
        limits=limits,
        store=store,
        futures=promises,
        checkpoints=saved,
        journal=journal,
        sessions=Sessions(store, saved, remains, config.session_timeout_s, config.retention_s, chronicle),
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
        worker = _worker_of(service, model_id)
        if worker is not None:
            line = worker.line(model_id)
            line.accepted, line.begun = accepted, finished
    for row in await service.store.pending():
        worker = _worker_of(service, row.model_id)
        if worker is not None:
            service.futures.open(row.id, row.owner, stored=True)
            worker.add(row)
    service.sampling.take_up()


def _worker_of(service: Service, model_id: str) -> Worker | None:
    """None for a model that is gone, or whose base model is no longer served."""
    model = service.store.find(Model, model_id)
    return service.workers.get(model.base_model) if model is not None else None


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
