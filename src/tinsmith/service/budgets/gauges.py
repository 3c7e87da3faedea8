"""Gauges of the budgets: what is used of each, and its limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from tinsmith.service.budgets.disk import DiskMonitor
from tinsmith.service.budgets.models import MemoryUse
from tinsmith.service.storage.records import Checkpoint
from tinsmith.service.storage.store import Store


def disk_gauges(disk: DiskMonitor, store: Store, journal_bytes: int) -> Iterable[Metric]:
    """Free space of the data folder, the reserve, and what takes space besides named checkpoints."""
    state = disk.state()
    yield GaugeMetricFamily("tinsmith_disk_free_bytes", "Free space of the data folder.", state.free_bytes)
    yield GaugeMetricFamily("tinsmith_disk_reserve_bytes", "disk_reserve.", state.reserve_bytes)
    unnamed = sum(version.size_bytes for version in store.all(Checkpoint) if version.kind == "ephemeral")
    yield GaugeMetricFamily("tinsmith_unnamed_version_bytes", "Unnamed sampler versions on disk.", unnamed)
    yield GaugeMetricFamily("tinsmith_journal_bytes", "Captured states, counted every minute.", journal_bytes)


def memory_gauges(engines: Mapping[str, MemoryUse]) -> Iterable[Metric]:
    """Memory of the models in training of each engine."""
    used = GaugeMetricFamily("tinsmith_model_memory_bytes", "Models in training in the engine.", labels=["model"])
    limit = GaugeMetricFamily("tinsmith_model_memory_limit_bytes", "model_memory; 0 for none.", labels=["model"])
    evicted = GaugeMetricFamily(
        "tinsmith_evicted_models", "Models in training that are on disk only.", labels=["model"]
    )
    for name, use in engines.items():
        used.add_metric([name], use.used_bytes)
        limit.add_metric([name], use.limit_bytes)
        evicted.add_metric([name], use.evicted)
    return used, limit, evicted
