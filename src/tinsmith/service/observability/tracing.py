"""A request as OpenTelemetry spans: the request, and in it submit, queue, pass and result.

Off unless an OTLP endpoint is configured; needs the extra `otel`. Spans are made when the request is closed, from the
moments that were noted on the way, so nothing is held open and nothing slows a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tinsmith.errors import ConfigError
from tinsmith.service.observability.metrics import Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider


class SpanExporter:
    """Timelines in, spans out."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tinsmith")

    def __call__(self, line: Timeline) -> None:
        """One request's spans."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        about = {
            "tinsmith.request_id": line.request_id,
            "tinsmith.session_id": line.request_id.partition(":")[0],
            "tinsmith.owner": line.owner,
            "tinsmith.model": line.model,
            **{f"tinsmith.tokens.{kind}": count for kind, count in line.tokens.items()},
        }
        whole = self._tracer.start_span(line.kind, start_time=line.arrived, attributes=about)
        inside = set_span_in_context(whole)
        for name, (start, end) in line.stages().items():
            self._tracer.start_span(name, inside, start_time=start).end(end)
        if line.error:
            whole.set_status(Status(StatusCode.ERROR, line.error))
        whole.end(line.finished)

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def open_span_exporter(endpoint: str) -> SpanExporter:
    """Spans to an OTLP collector, sent by a thread of their own. Raises ConfigError without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("otlp_endpoint is set, but OpenTelemetry is not installed.", "Install tinsmith[otel].") from (
            error
        )
    target = endpoint if endpoint.rstrip("/").endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
    return span_exporter(BatchSpanProcessor(OTLPSpanExporter(endpoint=target)))


@asynccontextmanager
async def tracing(endpoint: str | None) -> AsyncIterator[SpanExporter | None]:
    """Spans for as long as the service runs; None without an endpoint."""
    spans = open_span_exporter(endpoint) if endpoint else None
    try:
        yield spans
    finally:
        if spans is not None:
            await asyncio.to_thread(spans.close)


def span_exporter(processor: SpanProcessor) -> SpanExporter:
    """Spans to any processor."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(resource=Resource.create({"service.name": "tinsmith"}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return SpanExporter(provider)
