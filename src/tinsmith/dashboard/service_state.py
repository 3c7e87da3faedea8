"""A service as its HTTP API shows it to an administrator: models, processes, queues, tenants, sessions, throughput."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tinsmith.errors import ConfigError
from tinsmith.http_common import refusal

_TIMEOUT_S = 10.0
_SAMPLES = 720
_SAMPLE_S = 2.0
"""Least time between two samples of the throughput: 720 of them are 24 minutes and more."""
_RECENT_S = 60.0
_TOKENS, _REQUESTS = "tinsmith_tokens_total", "tinsmith_requests_total"

K = TypeVar("K")
TokenCount = tuple[str, str]
"""Base model and kind of tokens, as of the metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """What a service answered at one time."""

    base_models: Sequence[Mapping[str, Any]] = ()
    processes: Sequence[Mapping[str, Any]] = ()
    """Of each base model: its source, state and processes."""
    queues: Sequence[Mapping[str, Any]] = ()
    tenants: Sequence[Mapping[str, Any]] = ()
    sessions: Sequence[Mapping[str, Any]] = ()
    tokens: Mapping[TokenCount, float] = field(default_factory=dict)
    """Tokens by model and kind, since the start of the server."""
    tenant_tokens: Mapping[str, float] = field(default_factory=dict)
    """Tokens of each tenant, without those found in the cache."""
    requests: Mapping[str, float] = field(default_factory=dict)
    """Finished requests by outcome."""


_Sample = tuple[float, Mapping[TokenCount, float]]
"""Unix time, and tokens since the start of the server."""


class Throughput:
    """Rates of counters, from samples taken while someone looks."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)

    def add(self, now: float, totals: Mapping[TokenCount, float]) -> None:
        """Take a sample, unless the last one is newer than _SAMPLE_S. A server that was started again begins at 0."""
        if self._samples and any(totals.get(key, 0.0) < total for key, total in self._samples[-1][1].items()):
            self._samples.clear()
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, dict(totals)))

    def per_second(self, model: str, kind: str) -> float | None:
        """Tokens of a model per second in the last minute of samples; None before the second sample."""
        if len(self._samples) < 2:
            return None
        *before, last = self._samples
        first = next((each for each in before if each[0] >= last[0] - _RECENT_S), before[-1])
        return _rate(first, last, [(model, kind)])

    def chart(self) -> dict[str, Any]:
        """Tokens per second by kind between two samples, as a chart over Unix time."""
        pairs = list(zip(self._samples, list(self._samples)[1:], strict=False))
        keys = {key for _, totals in self._samples for key in totals}
        kinds = sorted({kind for _, kind in keys})
        lines = [
            {
                "label": kind.replace("_", " "),
                "values": [_rate(old, new, [key for key in keys if key[1] == kind]) for old, new in pairs],
            }
            for kind in kinds
        ]
        return {
            "section": "Throughput",
            "title": "Tokens per second",
            "limits": (0, None),
            "points": False,
            "is_time": True,
            "steps": [end for _, (end, _) in pairs],
            "lines": lines if pairs else [],
        }


def _rate(old: _Sample, new: _Sample, keys: Sequence[TokenCount]) -> float:
    return sum(new[1].get(key, 0.0) - old[1].get(key, 0.0) for key in keys) / (new[0] - old[0])


class ServiceClient:
    """Reads the state of a service. `transport`: the way to a service of this process, instead of the network."""

    def __init__(self, url: str, key: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url, self._key = url.rstrip("/"), key
        self._transport = transport
        self.throughput = Throughput()

    async def accepts(self, key: str) -> bool:
        """Whether a key is an administrator's."""
        try:
            async with self._http(key) as http:
                return (await http.get("/api/v1/admin/base_models")).is_success
        except httpx.HTTPError:
            return False

    async def state(self, key: str = "") -> ServiceState:
        """The state now, read with `key`, or else the key of this client. Raises ConfigError."""
        paths = ("base_models", "processes", "queue", "usage", "sessions")
        async with self._http(key or self._key) as http:
            *answers, metrics = await asyncio.gather(
                *(self._get(http, f"/api/v1/admin/{path}") for path in paths), self._get(http, "/metrics")
            )
        models, processes, queues, tenants, sessions = (answer.json() for answer in answers)
        samples = list(_samples(metrics.text))
        state = ServiceState(
            base_models=models["base_models"],
            processes=processes["base_models"],
            queues=queues["queues"],
            tenants=tenants["tenants"],
            sessions=sessions["sessions"],
            tokens=_totals(samples, _TOKENS, itemgetter("model", "kind")),
            tenant_tokens=_totals(
                [each for each in samples if each[1].get("kind") != "prompt_cached"], _TOKENS, itemgetter("owner")
            ),
            requests=_totals(samples, _REQUESTS, itemgetter("outcome")),
        )
        self.throughput.add(time.time(), state.tokens)
        return state

    def _http(self, key: str) -> httpx.AsyncClient:
        headers = {"X-API-Key": key, "accept": "application/json"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=_TIMEOUT_S, transport=self._transport)

    async def _get(self, http: httpx.AsyncClient, path: str) -> httpx.Response:
        try:
            response = await http.get(path)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ConfigError(
                f"No server responds at {self.url}: {reason}.", "Start it, or give another URL."
            ) from error
        if response.is_error:
            raise ConfigError(refusal(response, f"{self.url}{path}"), "The pages of a service need an admin key.")
        return response


def _samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _totals(
    samples: Sequence[tuple[str, Mapping[str, str], float]], name: str, key_of: Callable[[Mapping[str, str]], K]
) -> dict[K, float]:
    """The sum of a metric for each key of its labels."""
    totals: dict[K, float] = {}
    for metric, labels, value in samples:
        if metric == name:
            key = key_of(labels)
            totals[key] = totals.get(key, 0.0) + value
    return totals
