"""Gauges of what waits for each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from tinsmith.service.engines.host import EngineHost
from tinsmith.service.engines.queue_view import QueueEntry
from tinsmith.service.training.worker import Worker

Queues = dict[tuple[str, str], list[QueueEntry]]
"""What waits, by base model and queue."""


def queue_gauges(workers: Iterable[Worker], samples: Callable[[EngineHost], list[QueueEntry]]) -> Iterable[Metric]:
    """Length and wait of the queues of each base model, for training and for sampling; `samples` lists the latter."""
    queues: Queues = {}
    for worker in {id(worker): worker for worker in workers}.values():  # a worker has several names
        name = worker.host.names[0]
        queues[name, "training"] = _waiting(worker.queue())
        queues[name, "sampling"] = _waiting(samples(worker.host))
    yield _gauge("requests", "Requests that wait for the engine.", queues, len)
    yield _gauge("tokens", "Tokens of the requests that wait.", queues, lambda waiting: sum(e.tokens for e in waiting))
    yield _gauge("oldest_seconds", "Time that the oldest of them has waited.", queues, _oldest)
    yield _gauge("expected_seconds", "Time until the last of them is expected to end.", queues, _expected)


def _waiting(entries: Iterable[QueueEntry]) -> list[QueueEntry]:
    return [entry for entry in entries if not entry.running]


def _gauge(name: str, text: str, queues: Queues, value: Callable[[Sequence[QueueEntry]], float]) -> Metric:
    family = GaugeMetricFamily(f"tinsmith_waiting_{name}", text, labels=["model", "queue"])
    for labels, waiting in sorted(queues.items()):
        family.add_metric(labels, value(waiting))
    return family


def _oldest(waiting: Sequence[QueueEntry]) -> float:
    return max((entry.waited_s for entry in waiting), default=0.0)


def _expected(waiting: Sequence[QueueEntry]) -> float:
    return max((entry.expected_s or 0.0 for entry in waiting), default=0.0)
