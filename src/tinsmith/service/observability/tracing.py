"""OpenTelemetry spans of requests: one for the request, with children for submit, queue, pass and result.

Off unless an OTLP endpoint is configured; needs the extra `otel`. Spans are created from the timeline of a finished
request, so tracing does not slow requests down.
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
    """Creates the spans of finished requests from their timelines."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tinsmith")

    def __call__(self, line: Timeline) -> None:
        """Create the spans of one request."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        attributes = {
            "tinsmith.request_id": line.request_id,
            "tinsmith.session_id": line.request_id.partition(":")[0],
            "tinsmith.owner": line.owner,
            "tinsmith.model": line.model,
            **{f"tinsmith.tokens.{kind}": count for kind, count in line.tokens.items()},
        }
        root = self._tracer.start_span(line.kind, start_time=line.arrived, attributes=attributes)
        context = set_span_in_context(root)
        for name, (start, end) in line.stages().items():
            self._tracer.start_span(name, context, start_time=start).end(end)
        if line.error:
            root.set_status(Status(StatusCode.ERROR, line.error))
        root.end(line.finished)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def open_span_exporter(endpoint: str) -> SpanExporter:
    """An exporter to an OTLP collector, which sends in a thread. Raises ConfigError without the extra `otel`."""
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
    """An exporter for the duration of the block; None without an endpoint."""
    spans = open_span_exporter(endpoint) if endpoint else None
    try:
        yield spans
    finally:
        if spans is not None:
            await asyncio.to_thread(spans.close)


def span_exporter(processor: SpanProcessor) -> SpanExporter:
    """An exporter to any span processor."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(resource=Resource.create({"service.name": "tinsmith"}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return SpanExporter(provider)
