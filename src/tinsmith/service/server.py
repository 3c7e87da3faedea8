"""The server: builds the service from its parts, recovers what an earlier process accepted, and runs until a signal.

The port opens at once. `GET /api/v1/healthz` answers 503 until every engine is loaded, then 200; requests that need a
loading engine wait for it. If an engine cannot be loaded at the start, the server ends with its error; an engine that
dies later is restarted by its worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

from prometheus_client.core import Metric

from tinsmith.chat.tokenizer import TokenizerCache
from tinsmith.engine.config import check_source
from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.http_common import listen
from tinsmith.imports import require_torch
from tinsmith.service.app import DASHBOARD_PATH, Dashboard, create_app
from tinsmith.service.base_models import BaseModels
from tinsmith.service.budgets.activity import SessionActivity
from tinsmith.service.budgets.disk import DiskMonitor
from tinsmith.service.budgets.gauges import disk_gauges, memory_gauges
from tinsmith.service.budgets.memory import MemoryMonitor
from tinsmith.service.budgets.private import PRIVATE_UMASK, make_private
from tinsmith.service.budgets.versions import VersionLimits
from tinsmith.service.checkpoints import CheckpointCopies, Checkpoints
from tinsmith.service.concurrency import restart_on_error
from tinsmith.service.config import ServeConfig
from tinsmith.service.drain import Drain
from tinsmith.service.engines.clusters import engine_factory, transfer_of
from tinsmith.service.engines.host import EngineFactory, EngineHost, starting_after
from tinsmith.service.engines.queue_view import QueueEntry
from tinsmith.service.http.serving import HttpServer, Shutdown
from tinsmith.service.limits.bodies import LargeBodies
from tinsmith.service.limits.connections import Connections
from tinsmith.service.limits.decoders import Decoders
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.observability.event_loop import limit_collections, measure_delays
from tinsmith.service.observability.logs import configure_logging
from tinsmith.service.observability.metrics import (
    Telemetry,
    Timeline,
    engine_gauges,
    http_gauges,
    record_gauges,
    storage_gauges,
)
from tinsmith.service.observability.perfetto import TraceExporter
from tinsmith.service.observability.systemd import READY, Notifier
from tinsmith.service.observability.tracing import SpanExporter, tracing
from tinsmith.service.observability.usage import Usage
from tinsmith.service.results.futures import Futures
from tinsmith.service.results.result_files import ResultFiles
from tinsmith.service.results.unfinished_samples import UnfinishedSamples
from tinsmith.service.sampling import Sampling
from tinsmith.service.service import Service, server_key
from tinsmith.service.sessions import SessionCleanup, Sessions
from tinsmith.service.storage.folder_lock import lock_folder
from tinsmith.service.storage.object_copies import ObjectCopies, open_objects
from tinsmith.service.storage.records import Session
from tinsmith.service.storage.retention import Retention
from tinsmith.service.storage.store import Store, exclusive_store
from tinsmith.service.tenancy.keys import Tenants
from tinsmith.service.tenancy.quotas import QuotaEnforcer, ShadowLimits
from tinsmith.service.tenancy.signing import load_signer
from tinsmith.service.training.eviction import ModelBudget
from tinsmith.service.training.gauges import queue_gauges
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.worker import Worker
from tinsmith.service.wire.provenance import SequenceRegistry
from tinsmith.settings import writable_folder

log = logging.getLogger(__name__)


OnLoaded = Callable[[TinsmithError | None], None]
"""Called once: with None when all engines are loaded, else with the error of one that is not."""


def serve(
    config: ServeConfig,
    *,
    start: EngineFactory | None = None,
    on_ready: Callable[[str, str], None] | None = None,
    dashboard: Dashboard | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Calls `on_ready(url, key)` once the engines are loaded.

    `start` starts an engine; by default it follows from the settings. `dashboard` makes the pages at /dashboard.
    Raises ConfigError if the port or the data folder is in use, and the error of an engine that does not start.
    """
    if config.engine == "torch" and start is None:
        require_torch("The engine", "A client of another server needs none: model.base_url, or TINKER_BASE_URL.")
        if config.cluster.address is None:  # else the files may be on other machines
            for source in config.sources():
                check_source(source)
    configure_logging(config.log_format, config.log_level)
    _raise_file_limit()
    os.umask(PRIVATE_UMASK)
    has_vllm = config.sampler == "vllm"
    factory = engine_factory(config.cluster, config.data, config.store, config.store_cache, has_vllm=has_vllm)
    asyncio.run(_serve(config, start or factory, on_ready, dashboard))


async def _serve(
    config: ServeConfig,
    start: EngineFactory,
    on_ready: Callable[[str, str], None] | None,
    dashboard: Dashboard | None,
) -> None:
    listener = listen(config.host, config.port)
    url = f"http://{config.host}:{listener.getsockname()[1]}"
    loaded: asyncio.Future[TinsmithError | None] = asyncio.get_running_loop().create_future()
    async with run_service(config, start, loaded.set_result) as service:
        server, systemd = HttpServer(create_app(service, dashboard), service.connections), Notifier()
        shutdown = Shutdown(service, server, systemd)

        def announce(outcome: asyncio.Future[TinsmithError | None]) -> None:
            if outcome.cancelled() or outcome.result() is not None:
                shutdown.stop()
                return
            limit_collections()
            log.info("Ready: TINKER_BASE_URL=%s serves %s", url, ", ".join(service.workers))
            if dashboard is not None:
                log.info("Dashboard: %s%s", url, DASHBOARD_PATH)
            systemd.send(READY)
            if on_ready is not None:
                on_ready(url, service.key or "")

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, shutdown.on_signal)
        log.info("Loading %s; listening on %s", ", ".join(config.sources()), url)
        loaded.add_done_callback(announce)
        watchdog = asyncio.create_task(systemd.run())
        await server.serve([listener])
        watchdog.cancel()
    if loaded.done() and not loaded.cancelled() and (error := loaded.result()) is not None:
        raise error


@asynccontextmanager
async def run_service(config: ServeConfig, start: EngineFactory, on_loaded: OnLoaded) -> AsyncIterator[Service]:
    """Run a service, without its port, for the duration of the block.

    Raises ConfigError if the data folder cannot be written, if another server uses it or the database, or if the server
    is reachable from other machines and there is no key.
    """
    with lock_folder(writable_folder(config.data, "--data")):
        if changed := await asyncio.to_thread(make_private, config.data):
            log.info("Other users of this machine could read %d files and folders in %s before.", changed, config.data)
        async with exclusive_store(config.data, config.database) as store, tracing(config.otlp_endpoint) as spans:
            objects = await asyncio.to_thread(open_objects, config.store) if config.store is not None else None
            copies = ObjectCopies(store, objects, config.data, config.store_cache, transfer_of(start))
            service = _assemble(config, store, start, spans, copies)
            await _require_key(service)
            await _recover(service)
            async with _running(service, on_loaded):
                yield service


def _assemble(
    config: ServeConfig, store: Store, start: EngineFactory, spans: SpanExporter | None, copies: ObjectCopies
) -> Service:
    key = _key(config)
    unfinished = UnfinishedSamples(config.data / "samples")
    futures = Futures(config.hold_s, config.retention_s, unfinished, store.mark_fetched, ResultFiles(config.data))
    checkpoints = Checkpoints(store, config.data / "checkpoints", copies)
    tenants = Tenants(store.database, key)
    disk = DiskMonitor(config.data, config.disk_reserve)
    store.on_full_disk(disk.release_database_file)
    quotas = _quotas(config, tenants, store, futures, disk)
    journal = Journal(store, config.data / "journal", config.capture_every, disk, copies)
    audit_log = AuditLog(store, config.ended_retention_s)
    sequences, activity = SequenceRegistry(lambda sampler_id: _owner_of(store, sampler_id)), SessionActivity(store)
    budget = ModelBudget(activity=activity, memory=config.model_memory, idle_s=config.idle_model_s)

    def make_worker(source: str, names: list[str]) -> Worker:
        host = EngineHost(config.engine_config(source), names, starting_after(base_models.release_memory, start))
        return Worker(
            host, store, futures, journal, checkpoints, quotas, config.batch_tokens, telemetry, audit_log, budget
        )

    workers = (base_models := BaseModels(store, config.data, make_worker)).workers
    connections, bodies = Connections(config.connections_per_address, config.request_timeout_s), LargeBodies()
    gauges = partial(
        _gauges, store, workers, disk, journal, connections, bodies, futures, lambda host: sampling.queue(host)
    )
    telemetry = Telemetry(gauges, _on_finished(audit_log, spans))
    base_models.configure({name: source for source, names in config.sources().items() for name in names})
    sampling = Sampling(store, futures, checkpoints, quotas, workers, config.queued_samples, telemetry, sequences)
    cleanup = SessionCleanup(store, checkpoints, journal, futures, workers, _version_limits(config), disk)
    return Service(
        config=config,
        key=key,
        tenants=tenants,
        quotas=quotas,
        store=store,
        disk=disk,
        futures=futures,
        checkpoints=checkpoints,
        journal=journal,
        sessions=Sessions(
            store, checkpoints, cleanup, disk, activity, config.session_timeout_s, _retention(config), audit_log
        ),
        sampling=sampling,
        sequences=sequences,
        signer=load_signer(config.data),
        copies=CheckpointCopies(store, checkpoints),
        object_copies=copies,
        telemetry=telemetry,
        drain=Drain(base_models.distinct_workers, sampling),
        audit_log=audit_log,
        usage=Usage(store, audit_log),
        traces=TraceExporter(store, audit_log, config.data / "traces"),
        tokenizers=TokenizerCache(),
        connections=connections,
        bodies=bodies,
        decoders=Decoders(),
        base_models=base_models,
    )


def _version_limits(config: ServeConfig) -> VersionLimits:
    return VersionLimits(
        newest=config.sampler_versions, most=config.max_sampler_versions, retention_s=config.version_retention_s
    )


def _quotas(config: ServeConfig, tenants: Tenants, store: Store, futures: Futures, disk: DiskMonitor) -> QuotaEnforcer:
    shadows, samplers = ShadowLimits(config.shadows, config.shadow_bytes), config.sampling_sessions
    return QuotaEnforcer(tenants, store, futures, shadow_limits=shadows, disk=disk, samplers=samplers)


def _retention(config: ServeConfig) -> Retention:
    return Retention(fetched_s=config.retention_s, ended_s=config.ended_retention_s)


def _key(config: ServeConfig) -> str | None:
    key, is_new = server_key(config)
    if is_new:
        log.info('Made a key. To use it: export TINKER_API_KEY="$(cat %s)"', config.data / "api-key")
    return key


def _gauges(
    store: Store,
    workers: Mapping[str, Worker],
    disk: DiskMonitor,
    journal: Journal,
    connections: Connections,
    bodies: LargeBodies,
    futures: Futures,
    samples: Callable[[EngineHost], list[QueueEntry]],
) -> Iterator[Metric]:
    distinct = {worker.host.names[0]: worker for worker in workers.values()}
    yield from record_gauges(store)
    yield from storage_gauges(store)
    yield from engine_gauges(worker.host for worker in distinct.values())
    yield from disk_gauges(disk, store, journal.size_bytes)
    yield from queue_gauges(distinct.values(), samples)
    yield from http_gauges(len(connections), bodies.held_bytes, futures.result_bytes)
    yield from memory_gauges({name: worker.memory_use() for name, worker in distinct.items()})


def _owner_of(store: Store, sampler_id: str) -> str | None:
    """Tenant of a sampling session, whose record may be deleted before its session's."""
    session = store.find(Session, sampler_id.partition(":")[0])
    return session.owner if session is not None else None


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
    for worker in service.base_models.distinct_workers():
        worker.recover(seqs, pending)
    service.sampling.restore()


@asynccontextmanager
async def _running(service: Service, on_loaded: OnLoaded) -> AsyncIterator[None]:
    """Run engines and loops for the duration of the block; all of them have ended after it."""
    tasks = [
        asyncio.create_task(_load_models(service.base_models, on_loaded)),
        asyncio.create_task(restart_on_error(service.sessions.run)),
        asyncio.create_task(restart_on_error(service.tenants.run)),
        asyncio.create_task(restart_on_error(service.audit_log.run)),
        asyncio.create_task(restart_on_error(service.disk.run)),
        asyncio.create_task(restart_on_error(MemoryMonitor(service.base_models.release_memory).run)),
        asyncio.create_task(restart_on_error(service.journal.run)),
        asyncio.create_task(restart_on_error(service.object_copies.run)),
        asyncio.create_task(restart_on_error(service.sessions.store_heartbeats)),
        asyncio.create_task(measure_delays(service.telemetry.loop_delayed)),
    ]
    try:
        yield
    finally:
        service.futures.wake_waiters()
        await service.sampling.close()
        await asyncio.to_thread(service.decoders.close)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await service.base_models.close()
        service.futures.close()
        await service.audit_log.flush()
        service.disk.release_database_file()


async def _load_models(base_models: BaseModels, on_loaded: OnLoaded) -> None:
    try:
        await base_models.start()
    except TinsmithError as error:
        on_loaded(error)
    else:
        on_loaded(None)


def _raise_file_limit() -> None:
    """Allow 65536 open files: hundreds of polls are open at once, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
