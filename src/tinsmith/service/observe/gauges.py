"""What is counted when Prometheus asks: engines, sessions, models, sampling sessions, checkpoints."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from itertools import chain

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tinsmith.service.engines import EngineHost
from tinsmith.service.records import Checkpoint, Model, Sampler, Session
from tinsmith.service.store import Store


def held(store: Store) -> Iterable[Metric]:
    """What each owner has now."""
    living = {one.id for one in store.all(Session) if one.ended is None}
    kinds = chain(
        ((one.owner, "session") for one in store.all(Session) if one.id in living),
        ((one.owner, "model") for one in store.all(Model) if one.session_id in living),
        ((one.owner, "sampling_session") for one in store.all(Sampler) if one.session_id in living),
        ((one.owner, "checkpoint") for one in store.all(Checkpoint) if not one.deleted),
    )
    yield _gauge("objects", "Living sessions and what they hold; checkpoints.", ("owner", "kind"), Tally(kinds))
    sizes: Tally[tuple[str, ...]] = Tally()
    for one in store.all(Checkpoint):
        sizes[(one.owner,)] += one.size_bytes
    yield _gauge("checkpoint_bytes", "Adapters and optimizer states on disk.", ("owner",), sizes)


def engines(hosts: Iterable[EngineHost]) -> Iterable[Metric]:
    """Which run, and how often each was started again."""
    hosts = list(hosts)
    up = {(host.names[0],): int(host.is_up) for host in hosts}
    yield _gauge("engine_up", "1 while the engine is loaded and alive.", ("model",), up)
    samplers = {(host.names[0],): int(host.sampler_is_up) for host in hosts}
    yield _gauge("sampler_up", "1 while the engine and its sampler answer.", ("model",), samplers)
    family = CounterMetricFamily("tinsmith_engine_restarts", "Times that a dead engine was started.", labels=["model"])
    for host in hosts:
        family.add_metric([host.names[0]], max(0, host.starts - 1))
    yield family


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]) -> Metric:
    family = GaugeMetricFamily(f"tinsmith_{name}", text, labels=labels)
    for given, value in sorted(values.items()):
        family.add_metric(given, value)
    return family
