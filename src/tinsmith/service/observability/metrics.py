"""Metrics for Prometheus, and a log line and a timeline for each request.

Each request passes four moments: accepted, taken by its engine, run, closed; whoever brings it to one says so here, at
the cost of a few dictionary look-ups. Gauges are computed from the service's records at each scrape.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tinsmith.engine.base import Pass, PassResult
from tinsmith.service.engines.host import EngineHost
from tinsmith.service.observability.logs import arrival_ns, log_context
from tinsmith.service.storage.records import Checkpoint, FutureResult, Model, SamplingSession, Session
from tinsmith.service.storage.store import Store

log = logging.getLogger(__name__)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
FILL = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0)
MISMATCH_BUCKETS = (1e-6, 1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(slots=True, kw_only=True)
class Timeline:
    """One request's moments, in nanoseconds since 1970; 0 until it comes to pass."""

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
        """stage -> (its beginning, its end); stages that the request did not reach are left out."""
        marks = [("submit", self.arrived), ("queue", self.accepted), ("pass", self.started), ("result", self.ran)]
        reached = [mark for mark in marks if mark[1]]
        ends = [start for _, start in reached[1:]] + [self.finished]
        return {name: (start, end) for (name, start), end in zip(reached, ends, strict=True)}


class Telemetry:
    """The measures of one service, in a registry of their own."""

    def __init__(self, gauges: Callable[[], Iterable[Metric]], spans: Callable[[Timeline], None] | None) -> None:
        self._spans = spans
        self._open: dict[str, Timeline] = {}
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_AtScrape(lambda: [self._queue(), *gauges()]))
        self._requests = self._counter("requests", "Finished requests.", "owner", "model", "kind", "outcome")
        self._tokens = self._counter("tokens", "Tokens, by what was done with them.", "owner", "model", "kind")
        self._seconds = self._histogram("request_seconds", "A request's stages.", SECONDS, "kind", "stage")
        self._fill = self._histogram("batch_fill_ratio", "Tokens of a training batch / batch_tokens.", FILL, "model")
        self._rows = self._histogram("batch_requests", "Requests in a training batch.", COUNTS, "model")
        description = "Mean |sampler's - trainer's logprob| of the sampled tokens of a forward_backward."
        self._mismatch = self._histogram("logprob_mismatch", description, MISMATCH_BUCKETS, "model")
        self._http = self._histogram("http_seconds", "Answers over HTTP.", SECONDS, "method", "route", "status")

    def request_accepted(self, request_id: str, owner: str, kind: str, model: str) -> None:
        """It is promised, and waits for its engine."""
        now = time.time_ns()
        self._open[request_id] = Timeline(
            request_id=request_id, owner=owner, kind=kind, model=model, arrived=arrival_ns() or now, accepted=now
        )

    def requests_started(self, request_ids: Iterable[str]) -> None:
        """An engine begins with these."""
        now = time.time_ns()
        for line in self._lines(request_ids):
            line.started = now

    def requests_ran(self, request_ids: Iterable[str]) -> None:
        """The engine is done with these; their results are not written yet."""
        now = time.time_ns()
        for line in self._lines(request_ids):
            line.ran = now

    def batch_started(self, model: str, tokens: Sequence[int], budget: int) -> None:
        """A training batch of requests of so many tokens each."""
        self._fill.labels(model).observe(sum(tokens) / budget)
        self._rows.labels(model).observe(len(tokens))

    def record_mismatch(self, model: str, gaps: float) -> None:
        """Observe the mean logprob mismatch of one request, in nats per token."""
        self._mismatch.labels(model).observe(gaps)

    def request_finished(self, request_id: str, answer: FutureResult, tokens: Mapping[str, int] | None = None) -> None:
        """Its result can be fetched; `tokens` by what was done with them."""
        line = self._open.pop(request_id, None)
        if line is None:
            return
        line.finished, line.tokens = time.time_ns(), tokens or {}
        failed = answer.failed or answer.status != 200
        line.error = _fault(answer) if failed else ""
        self._requests.labels(line.owner, line.model, line.kind, "failed" if failed else "done").inc()
        for kind, count in line.tokens.items():
            self._tokens.labels(line.owner, line.model, kind).inc(count)
        for stage, (start, end) in line.stages().items():
            self._seconds.labels(line.kind, stage).observe((end - start) / 1e9)
        self._seconds.labels(line.kind, "total").observe((line.finished - line.arrived) / 1e9)
        self._log(line)
        if self._spans is not None:
            self._spans(line)

    def http_finished(self, method: str, route: str, status: int, seconds: float) -> None:
        """An HTTP request has its answer."""
        self._http.labels(method, route, str(status)).observe(seconds)

    def scrape(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _lines(self, request_ids: Iterable[str]) -> Iterable[Timeline]:
        return [self._open[record] for record in request_ids if record in self._open]

    def _log(self, line: Timeline) -> None:
        if not line.error and not log.isEnabledFor(logging.DEBUG):
            return
        with log_context(line.request_id, line.owner):
            if line.error:
                log.warning("%s failed: %s", line.kind, line.error)
                return
            spent = ", ".join(f"{name} {(end - start) / 1e6:.1f} ms" for name, (start, end) in line.stages().items())
            log.debug("%s done: %s", line.kind, spent)

    def _queue(self) -> Metric:
        family = GaugeMetricFamily(
            "tinsmith_queue_requests", "Requests without a result.", labels=["owner", "kind", "stage"]
        )
        tally = Tally(
            (record.owner, record.kind, "running" if record.started else "waiting") for record in self._open.values()
        )
        for labels, count in sorted(tally.items()):
            family.add_metric(labels, count)
        return family

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tinsmith_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"tinsmith_{name}", text, labels, buckets=buckets, registry=self._registry)


class _AtScrape(Collector):
    """Metrics that are computed at each scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


def _fault(answer: FutureResult) -> str:
    body = json.loads(answer.body)
    return str(body.get("error") or body.get("detail") or answer.status)


def record_gauges(store: Store) -> Iterable[Metric]:
    """Gauges of each owner's sessions, models and checkpoints."""
    living = {record.id for record in store.all(Session) if record.ended is None}
    kinds = chain(
        ((record.owner, "session") for record in store.all(Session) if record.id in living),
        ((record.owner, "model") for record in store.all(Model) if record.session_id in living),
        ((record.owner, "sampling_session") for record in store.all(SamplingSession) if record.session_id in living),
        ((record.owner, "checkpoint") for record in store.all(Checkpoint) if not record.deleted),
    )
    yield _gauge("objects", "Living sessions and what they hold; checkpoints.", ("owner", "kind"), Tally(kinds))
    sizes: Tally[tuple[str, ...]] = Tally()
    for record in store.all(Checkpoint):
        sizes[(record.owner,)] += record.size_bytes
    yield _gauge("checkpoint_bytes", "Adapters and optimizer states on disk.", ("owner",), sizes)


def engine_gauges(hosts: Iterable[EngineHost]) -> Iterable[Metric]:
    """Gauges of engines and samplers, and counters of restarts."""
    hosts = list(hosts)
    up = {(host.names[0],): int(host.is_up) for host in hosts}
    yield _gauge("engine_up", "1 while the engine is loaded and alive.", ("model",), up)
    samplers = {(host.names[0],): int(host.sampler_is_up) for host in hosts}
    yield _gauge("sampler_up", "1 while the engine and its sampler answer.", ("model",), samplers)
    family = CounterMetricFamily("tinsmith_engine_restarts", "Times that a dead engine was started.", labels=["model"])
    for host in hosts:
        family.add_metric([host.names[0]], max(0, host.start_count - 1))
    yield family


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]) -> Metric:
    family = GaugeMetricFamily(f"tinsmith_{name}", text, labels=labels)
    for label_values, value in sorted(values.items()):
        family.add_metric(label_values, value)
    return family


def mean_logprob_gap(request: Pass, result: PassResult) -> float | None:
    """Mean |q - p| over the positions with an advantage (prompts have none); None where nothing was sampled."""
    gaps = [
        np.abs(datum.inputs["logprobs"] - logprobs)[datum.inputs["advantages"] != 0]
        for datum, logprobs in zip(request.data, result.logprobs, strict=True)
        if "logprobs" in datum.inputs and "advantages" in datum.inputs
    ]
    count = sum(len(record) for record in gaps)
    return float(sum(record.sum(dtype=np.float64) for record in gaps) / count) if count else None
