"""/metrics: values and access; spans of requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from tests.service.support.inprocess import KEY, Api, Factory, api, pass_body, until
from tinsmith.service.app import create_app
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.observability.tracing import open_span_exporter, span_exporter
from tinsmith.service.storage.records import FutureResult


async def measured(app: Api) -> dict[tuple[str, ...], float]:
    """(name, label values in order of label names) -> value, read by the Prometheus parser."""
    answer = await app.http.get("/metrics")
    assert answer.status_code == 200, answer.text
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


async def sampled(app: Api, session: str, seq: int = 0, **params) -> httpx.Response:
    made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = (await app.post("create_sampling_session", made)).json()["sampling_session_id"]
    prompt = {"chunks": [{"tokens": [1, 2, 3]}]}
    body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": params}
    return await app.post("asample", body)


def test_metrics_count_requests_tokens_batches_and_objects(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, batch_tokens=10) as app:
            model = await app.model()
            await app.result((await app.post("forward_backward", pass_body(model, 1))).json())
            await app.result((await app.post("forward_backward", pass_body(model, 2, forward_only=True))).json())
            await app.step(model, 3)
            session = model.partition(":")[0]
            await app.result((await sampled(app, session, max_tokens=5, stop=[])).json())
            refused = await app.post("optim_step", {"model_id": model, "seq_id": 4, "adam_params": {"beta1": 7}})
            assert refused.status_code == 400
            values = await measured(app)
            for kind in ("create", "forward_backward", "forward", "step", "sample"):
                assert values["tinsmith_requests_total", kind, "toy", "done", "local"] == 1
                assert values["tinsmith_request_seconds_count", kind, "total"] == 1
            tokens = {kind: values["tinsmith_tokens_total", kind, "toy", "local"] for kind in ("prompt", "sample")}
            assert tokens == {"prompt": 3, "sample": 5}
            assert values["tinsmith_tokens_total", "forward_backward", "toy", "local"] == 3
            assert values["tinsmith_tokens_total", "forward", "toy", "local"] == 3
            assert values["tinsmith_batch_requests_count", "toy"] == 2
            assert values["tinsmith_batch_fill_ratio_sum", "toy"] == pytest.approx(0.6)
            assert values["tinsmith_objects", "model", "local"] == 1
            assert values["tinsmith_engine_up", "toy"] == 1
            assert values["tinsmith_engine_restarts_total", "toy"] == 0
            assert values["tinsmith_http_seconds_count", "POST", "/optim_step", "400"] == 1
            assert values[("process_resident_memory_bytes",)] > 1e6

    asyncio.run(main())


def test_unknown_methods_and_paths_share_one_label(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            for number in range(5):
                await app.http.request(f"X{number}", f"/nowhere/{number}", headers={"X-API-Key": ""})
            counts = {key: n for key, n in (await measured(app)).items() if key[0] == "tinsmith_http_seconds_count"}
            assert counts == {("tinsmith_http_seconds_count", "(other)", "(none)", "404"): 5}

    asyncio.run(main())


def test_metrics_show_queued_requests_and_engine_restarts(tmp_path: Path) -> None:
    async def main() -> None:
        factory, go = Factory(), asyncio.Event()
        called = set[str]()

        def hook(call: str, argument: object) -> Awaitable[None] | None:
            called.add(call)
            return go.wait() if call in ("step", "sample") else None

        factory.hook = hook
        async with api(tmp_path, factory) as app:
            model = await app.model()
            for seq in (1, 2, 3):
                await app.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": {}})
            await sampled(app, model.partition(":")[0], max_tokens=1)
            await until(lambda: {"step", "sample"} <= called)
            values = await measured(app)
            assert values["tinsmith_queue_requests", "step", "local", "running"] == 1
            assert values["tinsmith_queue_requests", "step", "local", "waiting"] == 2
            assert values["tinsmith_queue_requests", "sample", "local", "running"] == 1
            factory.kill()
            go.set()
            await app.result({"request_id": f"{model}:3"})
            values = await measured(app)
            assert values["tinsmith_engine_restarts_total", "toy"] == 1
            assert values["tinsmith_requests_total", "sample", "toy", "failed", "local"] == 1
            assert not [name for name in values if name[0] == "tinsmith_queue_requests"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("client", "headers", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("::1", {}, 200),
        ("10.0.0.7", {}, 401),
        ("127.0.0.1", {"X-Forwarded-For": "10.0.0.7"}, 401),
        ("10.0.0.7", {"X-API-Key": KEY}, 200),
        ("10.0.0.7", {"Authorization": f"Bearer {KEY}"}, 200),
        ("10.0.0.7", {"Authorization": "Bearer tml-other"}, 401),
    ],
)
def test_metrics_are_readable_locally_or_with_the_server_key(
    tmp_path: Path, client: str, headers: dict[str, str], status: int
) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            transport = httpx.ASGITransport(create_app(app.service), client=(client, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
                assert (await http.get("/metrics", headers=headers)).status_code == status

    asyncio.run(main())


def test_span_of_a_request_contains_its_stages() -> None:
    memory = InMemorySpanExporter()
    spans = span_exporter(SimpleSpanProcessor(memory))
    telemetry = Telemetry(lambda: [], spans)
    for request_id in ("s:train:0:1", "s:train:0:2"):
        telemetry.request_accepted(request_id, "ann", "forward_backward", "toy")
    telemetry.requests_started(["s:train:0:1"])
    telemetry.requests_ran(["s:train:0:1"])
    telemetry.request_finished("s:train:0:1", FutureResult.of({}), {"forward_backward": 7})
    telemetry.request_finished("s:train:0:2", FutureResult(body=b'{"error": "too long"}', failed=True))
    telemetry.request_finished("unknown", FutureResult.of({}))
    *inner, whole = memory.get_finished_spans()[:5]
    assert [span.name for span in inner] == ["submit", "queue", "pass", "result"]
    assert {span.parent.span_id for span in inner if span.parent} == {whole.context.span_id}
    assert whole.attributes is not None
    assert whole.attributes["tinsmith.session_id"] == "s"
    assert whole.attributes["tinsmith.tokens.forward_backward"] == 7
    assert inner[0].start_time == whole.start_time
    assert inner[-1].end_time == whole.end_time
    assert [span.end_time for span in inner[:-1]] == [span.start_time for span in inner[1:]]
    *inner, failed = memory.get_finished_spans()[5:]
    assert [span.name for span in inner] == ["submit", "queue"]
    assert failed.status.description == "too long"
    spans.close()


def test_spans_are_exported_over_http() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        serving = threading.Thread(target=collector.serve_forever)
        serving.start()
        spans = open_span_exporter(f"http://127.0.0.1:{collector.server_port}/")
        telemetry = Telemetry(lambda: [], spans)
        telemetry.request_accepted("s:sample:0:1", "ann", "sample", "toy")
        telemetry.request_finished("s:sample:0:1", FutureResult.of({}))
        spans.close()
        collector.shutdown()
        serving.join()
    [(path, body)] = got
    assert path == "/v1/traces"
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    assert {span.name for scope in resource.scope_spans for span in scope.spans} == {"sample", "submit", "queue"}
