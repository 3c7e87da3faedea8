"""Prometheus metrics, and a log line and a timeline for each request.

The code that accepts, starts, runs and finishes a request reports it to `Telemetry`, which costs a few dictionary
look-ups. Gauges are computed from the service's records at each scrape.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from tinsmith.engine.base import Pass, PassResult
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.errors import TinsmithError
from tinsmith.service.engines.host import EngineHost
from tinsmith.service.observability.logs import arrival_ns, log_context
from tinsmith.service.storage.records import Checkpoint, FutureResult, Model, SamplingSession, Session
from tinsmith.service.storage.store import Store

log = logging.getLogger(__name__)

MetricT = TypeVar("MetricT", Counter, Histogram)

# Upper bounds of histogram buckets.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
FILL = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0)
MISMATCH_BUCKETS = (1e-6, 1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Times of one request in nanoseconds since 1970; 0 for those not reached yet."""

    request_id: str
    owner: str
    kind: str
    model: str
    arrived: int
    accepted: int
    started: int = 0
    ran: int = 0
    finished: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    error: str = ""

    def stages(self) -> dict[str, tuple[int, int]]:
        """Map each stage that the request reached to (start, end)."""
        marks = [("submit", self.arrived), ("queue", self.accepted), ("pass", self.started), ("result", self.ran)]
        reached = [mark for mark in marks if mark[1]]
        ends = [start for _, start in reached[1:]] + [self.finished]
        return {name: (start, end) for (name, start), end in zip(reached, ends, strict=True)}


class Telemetry:
    """Metrics of one service, in their own registry. `spans` gets the timeline of each finished request."""

    def __init__(self, gauges: Callable[[], Iterable[Metric]], spans: Callable[[Timeline], None] | None) -> None:
        self._spans = spans
        self._open: dict[str, Timeline] = {}
        self._children: dict[tuple[Any, ...], Any] = {}
        """(metric, values of its labels) -> the metric with these labels: the library's look-up takes a lock."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_ScrapeCollector(lambda: [self._queue(), *gauges()]))
        self._requests = self._counter("requests", "Finished requests.", "owner", "model", "kind", "outcome")
        self._tokens = self._counter(
            "tokens", "Tokens by kind: trained, prompt, cached prompt, sampled.", "owner", "model", "kind"
        )
        self._seconds = self._histogram(
            "request_seconds", "Time in each stage of a request, and in total.", SECONDS, "kind", "stage"
        )
        self._fill = self._histogram("batch_fill_ratio", "Tokens of a training batch / batch_tokens.", FILL, "model")
        self._rows = self._histogram("batch_requests", "Requests in a training batch.", COUNTS, "model")
        description = "Mean |sampler's - trainer's logprob| of the sampled tokens of a forward_backward."
        self._mismatch = self._histogram("logprob_mismatch", description, MISMATCH_BUCKETS, "model")
        self._http = self._histogram("http_seconds", "Duration of HTTP requests.", SECONDS, "method", "route", "status")
        self._delay = self._histogram("event_loop_delay_seconds", "Time by which the API's timers are late.", SECONDS)

    def request_accepted(self, request_id: str, owner: str, kind: str, model: str) -> None:
        """The request is accepted and queued."""
        now = time.time_ns()
        self._open[request_id] = Timeline(
            request_id=request_id, owner=owner, kind=kind, model=model, arrived=arrival_ns() or now, accepted=now
        )

    def requests_started(self, request_ids: Iterable[str]) -> None:
        """An engine starts to run the requests."""
        now = time.time_ns()
        for line in self._lines(request_ids):
            line.started = now

    def requests_ran(self, request_ids: Iterable[str]) -> None:
        """The engine has run the requests; their results are not stored yet."""
        now = time.time_ns()
        for line in self._lines(request_ids):
            line.ran = now

    def batch_started(self, model: str, tokens: Sequence[int], budget: int) -> None:
        """Observe a training batch; `tokens` has the tokens of each of its requests."""
        self._labelled(self._fill, model).observe(sum(tokens) / budget)
        self._labelled(self._rows, model).observe(len(tokens))

    def record_mismatches(
        self, model: str, passes: Sequence[Pass], results: Sequence[PassResult | TinsmithError]
    ) -> None:
        """Observe the mean logprob mismatch of each pass that has one, in nats per token."""
        for request, result in zip(passes, results, strict=True):
            gap = mean_logprob_gap(request, result) if isinstance(result, PassResult) else None
            if gap is not None:
                self._labelled(self._mismatch, model).observe(gap)

    def request_finished(self, request_id: str, result: FutureResult, tokens: Mapping[str, int] | None = None) -> None:
        """The result can be fetched. `tokens` counts tokens by kind."""
        line = self._open.pop(request_id, None)
        if line is None:
            return
        line.finished, line.tokens = time.time_ns(), tokens or {}
        failed = result.failed or result.status != 200
        line.error = _error_text(result) if failed else ""
        self._labelled(self._requests, line.owner, line.model, line.kind, "failed" if failed else "done").inc()
        for kind, count in line.tokens.items():
            self._labelled(self._tokens, line.owner, line.model, kind).inc(count)
        for stage, (start, end) in line.stages().items():
            self._labelled(self._seconds, line.kind, stage).observe((end - start) / 1e9)
        self._labelled(self._seconds, line.kind, "total").observe((line.finished - line.arrived) / 1e9)
        self._log(line)
        if self._spans is not None:
            self._spans(line)

    def http_finished(self, method: str, route: str, status: int, seconds: float) -> None:
        """An HTTP request was answered."""
        self._labelled(self._http, method, route, str(status)).observe(seconds)

    def loop_delayed(self, seconds: float) -> None:
        """A timer of the event loop fired late: a request waited as long before anything was done for it."""
        self._delay.observe(seconds)

    def scrape(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def _labelled(self, metric: MetricT, *labels: str) -> MetricT:
        key = (metric, *labels)
        if key not in self._children:
            self._children[key] = metric.labels(*labels)
        return self._children[key]

    def _lines(self, request_ids: Iterable[str]) -> Iterable[Timeline]:
        return [self._open[request_id] for request_id in request_ids if request_id in self._open]

    def _log(self, line: Timeline) -> None:
        if not line.error and not log.isEnabledFor(logging.DEBUG):
            return
        with log_context(line.request_id, line.owner):
            if line.error:
                log.warning("%s failed: %s", line.kind, line.error)
                return
            times = ", ".join(f"{name} {(end - start) / 1e6:.1f} ms" for name, (start, end) in line.stages().items())
            log.debug("%s done: %s", line.kind, times)

    def _queue(self) -> Metric:
        family = GaugeMetricFamily(
            "tinsmith_queue_requests", "Requests without a result.", labels=["owner", "kind", "stage"]
        )
        tally = Tally((line.owner, line.kind, "running" if line.started else "waiting") for line in self._open.values())
        for labels, count in sorted(tally.items()):
            family.add_metric(labels, count)
        return family

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tinsmith_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"tinsmith_{name}", text, labels, buckets=buckets, registry=self._registry)


class _ScrapeCollector(Collector):
    """Computes metrics at each scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    @override
    def collect(self) -> Iterable[Metric]:
        return self._families()


def _error_text(result: FutureResult) -> str:
    body = json.loads(result.body)
    return str(body.get("error") or body.get("detail") or result.status)


def record_gauges(store: Store) -> Iterable[Metric]:
    """Gauges of sessions, models and checkpoints by owner."""
    open_sessions = {record.id for record in store.all(Session) if record.ended is None}
    kinds = chain(
        ((record.owner, "session") for record in store.all(Session) if record.id in open_sessions),
        ((record.owner, "model") for record in store.all(Model) if record.session_id in open_sessions),
        (
            (record.owner, "sampling_session")
            for record in store.all(SamplingSession)
            if record.session_id in open_sessions
        ),
        ((record.owner, "checkpoint") for record in store.all(Checkpoint) if not record.deleted),
    )
    yield _gauge(
        "objects", "Open sessions, their models and sampling sessions; checkpoints.", ("owner", "kind"), Tally(kinds)
    )
    sizes = {(owner,): store.checkpoint_bytes(owner) for owner in {record.owner for record in store.all(Checkpoint)}}
    yield _gauge("checkpoint_bytes", "Adapters and optimizer states on disk.", ("owner",), sizes)


def storage_gauges(store: Store) -> Iterable[Metric]:
    """Size of the database and of the payloads beside it, and whether it can be written."""
    is_up = {(): int(store.is_available)}
    yield _gauge("database_up", "1 unless the last transaction found no database or no disk.", (), is_up)
    yield _gauge("database_bytes", "Size of the database's files.", (), {(): store.database_bytes()})
    yield _gauge("payload_bytes", "Size of the files with payloads of requests.", (), {(): store.payload_bytes()})
    counts: dict[tuple[str, ...], int] = {(table,): count for table, count in store.row_counts.items()}
    yield _gauge("database_rows", "Rows of each table, counted every ten minutes.", ("table",), counts)


def engine_gauges(hosts: Iterable[EngineHost]) -> Iterable[Metric]:
    """State of engines and samplers, and counters of restarts."""
    hosts = list(hosts)
    up = {(host.names[0],): int(host.is_up) for host in hosts}
    yield _gauge("engine_up", "1 while the engine is loaded and alive.", ("model",), up)
    samplers = {(host.names[0],): int(host.sampler_is_up) for host in hosts}
    yield _gauge("sampler_up", "1 while the engine and its sampler answer.", ("model",), samplers)
    text = "Time without progress while requests run; 0 without any."
    ages = {(host.names[0],): host.progress_age_s for host in hosts}
    yield _gauge("engine_progress_age_seconds", text, ("model",), ages)
    family = CounterMetricFamily("tinsmith_engine_restarts", "Restarts of dead engines.", labels=["model"])
    for host in hosts:
        family.add_metric([host.names[0]], max(0, host.start_count - 1))
    yield family
    yield from _replica_gauges({host.names[0]: host.pool for host in hosts if host.pool is not None})


def _replica_gauges(pools: Mapping[str, SamplerPool]) -> Iterable[Metric]:
    """State of sampler replicas, by model and place, and what their pool has routed."""
    states = {(model, str(each.index)): each for model, pool in pools.items() for each in pool.status()}
    for name, text in (
        ("up", "1 while the replica answers."),
        ("requests", "Requests that the replica samples."),
        ("cache_tokens", "Cache tokens that the requests of the replica reserve."),
        ("versions", "Adapter versions that the replica was given."),
    ):
        values = {labels: float(getattr(state, name)) for labels, state in states.items()}
        yield _gauge(f"sampler_replica_{name}", text, ("model", "replica"), values)
    restarts = CounterMetricFamily(
        "tinsmith_sampler_replica_restarts", "Restarts of dead replicas.", labels=["model", "replica"]
    )
    for labels, state in states.items():
        restarts.add_metric(labels, max(0, state.starts - 1))
    yield restarts
    for name, text in (
        ("routed", "Requests given to a replica."),
        ("routed_by_prefix", "Requests given to the replica that has their prefix."),
        ("moved", "Requests that went to another replica after a death."),
    ):
        family = CounterMetricFamily(f"tinsmith_samples_{name}", text, labels=["model"])
        for model, pool in pools.items():
            family.add_metric([model], getattr(pool.counts, name))
        yield family


def http_gauges(connections: int, body_bytes: int, result_bytes: Mapping[str, int]) -> Iterable[Metric]:
    """What clients hold of the server at the moment. `result_bytes`: by the place of the results."""
    results = {(place,): size for place, size in result_bytes.items()}
    text = "Results that clients may still fetch, besides those in the store."
    yield _gauge("result_bytes", text, ("place",), results)
    yield _gauge("http_connections", "Open connections.", (), {(): connections})
    yield _gauge("http_body_bytes", "Large bodies that are received or processed.", (), {(): body_bytes})


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(f"tinsmith_{name}", text, labels=labels)
    for label_values, value in sorted(values.items()):
        family.add_metric(label_values, value)
    return family


def mean_logprob_gap(request: Pass, result: PassResult) -> float | None:
    """Mean |q - p| of a pass over positions with a nonzero advantage; None if there are none.

    q are the sampler's logprobs, p the trainer's.
    """
    gaps = [
        np.abs(datum.inputs["logprobs"] - logprobs)[datum.inputs["advantages"] != 0]
        for datum, logprobs in zip(request.data, result.logprobs, strict=True)
        if "logprobs" in datum.inputs and "advantages" in datum.inputs
    ]
    count = sum(len(gap) for gap in gaps)
    return float(sum(gap.sum(dtype=np.float64) for gap in gaps) / count) if count else None
