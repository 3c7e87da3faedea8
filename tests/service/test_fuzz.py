"""Fuzzing: no request gets a 5xx response, and the next valid request works."""

from __future__ import annotations

import io
import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
import zstandard
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.service.support import answers, openapi
from tests.service.support.inprocess import pass_body
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded
from tinsmith.service.wire.protobuf import pb

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

MIB = 2**20


@dataclass
class Fuzzed:
    """A served fake engine with a session, a model, a sampling session and checkpoints."""

    http: httpx.Client
    url: str
    session: str
    model: str
    sampler: str
    seqs: Iterator[int]

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=content, **options)

    def result(self, promise: httpx.Response) -> httpx.Response:
        assert promise.status_code == 200, promise.text
        answer = self.post("retrieve_future", {"request_id": promise.json()["request_id"]})
        while answer.status_code == 408:
            answer = self.post("retrieve_future", {"request_id": promise.json()["request_id"]})
        return answer

    def works(self) -> None:
        """Check that the next valid requests succeed."""
        answer = self.result(self.post("forward_backward", pass_body(self.model, next(self.seqs))))
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-protobuf", answer.text
        ask = {"sampling_session_id": self.sampler, "seq_id": next(self.seqs), "prompt": {"chunks": [{"tokens": [1]}]}}
        sampled = self.result(self.post("asample", {**ask, "sampling_params": {"max_tokens": 2}}))
        assert sampled.headers["content-type"] == "application/x-protobuf", sampled.text


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    data: Path = tmp_path_factory.mktemp("fuzzed")
    config = ServeConfig(models=("toy",), engine="fake", data=data, hold_s=0.2, log_level="warning")
    with (
        embedded(config) as (url, key),
        httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=120) as http,
    ):
        session = http.post("create_session", json={}).json()["session_id"]
        made = Fuzzed(http, url, session, f"{session}:train:0", f"{session}:sample:0", count(1))
        made.result(made.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "toy"}))
        request = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
        assert made.post("create_sampling_session", request).status_code == 200
        for path in ("save_weights", "save_weights_for_sampler"):
            made.result(made.post(path, {"model_id": made.model, "seq_id": next(made.seqs), "path": "saved"}))
        made.works()
        yield made
        made.works()
        assert "Traceback" not in (data / "serve.log").read_text()


def fuzz_by_schema(fuzzed: Fuzzed, examples: int) -> None:
    """Every operation of the OpenAPI schema with generated parameters and bodies."""
    ids = {
        "session_id": fuzzed.session, "model_id": fuzzed.model, "sampling_session_id": fuzzed.sampler,
        "run": fuzzed.model,
        "sampler_id": fuzzed.sampler, "base_model": "toy", "model": "toy", "kind": "weights", "name": "saved",
        "path": f"tinker://{fuzzed.model}/weights/saved", "tinker_path": f"tinker://{fuzzed.model}/weights/saved",
        "request_id": f"{fuzzed.model}:1", "source_path": f"tinker://{fuzzed.model}/weights/saved",
    }  # fmt: skip
    spec = openapi.schema(ids)
    spec["paths"].pop("/api/v1/sessions/{session_id}/finish")  # would end the session that other operations use
    spec["paths"]["/api/v1/auth/apikey/me"].pop("delete")
    operations = [operation.ok() for operation in schemathesis.openapi.from_dict(spec).get_all_operations()]
    assert len(operations) > 30
    failed = {operation.label: fault for operation in operations if (fault := fault_of(fuzzed, operation, examples))}
    assert failed == {}


def fault_of(fuzzed: Fuzzed, operation: schemathesis.APIOperation, examples: int) -> str:
    """The request to which this operation responded with 5xx or not in its API's form; empty if there was none."""
    faults = []

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy())
    def ask(case: schemathesis.Case) -> None:
        answer = case.call(base_url=fuzzed.url, headers=dict(fuzzed.http.headers), timeout=120)
        if fault := answers.fault_of(operation.path, answer):
            faults.append(f"{fault}: {case.path_parameters} {case.query} {case.body!r}")

    ask()
    return faults[0] if faults else ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_schema_conforming_requests_never_return_5xx(fuzzed: Fuzzed) -> None:
    fuzz_by_schema(fuzzed, 15)
    fuzzed.works()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_long_search_never_returns_5xx(fuzzed: Fuzzed) -> None:
    fuzz_by_schema(fuzzed, 200)
    fuzzed.works()


def frame(size: int, declared: int | None = None) -> bytes:
    """A zstd frame of `size` zeros; its header declares no size, or `declared` bytes."""
    out = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as writer:
        for _ in range(size // MIB):
            writer.write(bytes(MIB))
    body = bytearray(out.getvalue())
    if declared is not None:  # descriptor with an 8-byte content size, single segment
        body[4:6] = bytes([0b11100000]) + struct.pack("<Q", declared)
    return bytes(body)


BODIES = {
    "empty": (b"", {}),
    "JSON": (b'{"model_id": "x"}', {}),
    "random": (np.random.default_rng(0).bytes(4096), {}),
    "not zstd": (b"\x00" * 64, {"Content-Encoding": "zstd"}),
    "zstd cut short": (frame(4 * MIB)[:20], {"Content-Encoding": "zstd"}),
    "zstd bomb": (frame(1024 * MIB), {"Content-Encoding": "zstd"}),
    "zstd with a false size": (frame(4 * MIB, declared=2**62), {"Content-Encoding": "zstd"}),
    "another encoding": (b"x", {"Content-Encoding": "br"}),
}


@pytest.mark.parametrize("name", BODIES)
def test_rejects_missing_bodies(fuzzed: Fuzzed, name: str) -> None:
    body, headers = BODIES[name]
    began = time.monotonic()
    answer = fuzzed.post("forward_backward", body, headers=headers)
    assert 400 <= answer.status_code < 500
    assert answer.json()["detail"]
    assert time.monotonic() - began < 100
    fuzzed.works()


@pytest.mark.slow
def test_rejects_bodies_over_the_limit(fuzzed: Fuzzed) -> None:
    assert fuzzed.post("forward_backward", bytes(257 * MIB)).status_code == 413
    fuzzed.works()


def message(fuzzed: Fuzzed) -> pb.ForwardBackwardRequest:
    return pb.ForwardBackwardRequest.FromString(pass_body(fuzzed.model, next(fuzzed.seqs)))


def damaged(fuzzed: Fuzzed) -> Iterator[tuple[str, pb.ForwardBackwardRequest]]:
    """Well-formed but invalid messages."""
    targets = "target_tokens"
    for name, shape in {
        "huge": [2**40, 2**40], "negative": [-3], "too long": [4], "too short": [2], "zero": [0], "deep": [3, 1, 1, 1],
    }.items():  # fmt: skip
        bad = message(fuzzed)
        bad.data[0].loss_fn_inputs[targets].shape[:] = shape
        yield f"shape {name}", bad
    for dtype in (0, 3, 4, 9):
        bad = message(fuzzed)
        bad.data[0].loss_fn_inputs[targets].dtype = dtype  # type: ignore[assignment]
        yield f"dtype {dtype}", bad
    bad = message(fuzzed)
    bad.data[0].loss_fn_inputs[targets].dtype = pb.DTYPE_FLOAT32
    yield "float targets", bad
    bad = message(fuzzed)
    bad.data[0].loss_fn_inputs[targets].dense = b"abc"
    yield "partial float32", bad
    bad = message(fuzzed)
    csr = bad.data[0].loss_fn_inputs[targets].sparse_csr
    csr.values, csr.crow_indices, csr.col_indices = (np.array(v, "<i8").tobytes() for v in ([1], [0, 1], [2**40]))
    bad.data[0].loss_fn_inputs[targets].shape[:] = [2**31, 2**31]
    yield "sparse and huge", bad
    for value in (np.nan, np.inf, -np.inf):
        bad = message(fuzzed)
        weights = bad.data[0].loss_fn_inputs["weights"]
        weights.dtype, weights.dense = pb.DTYPE_FLOAT32, np.full(3, value, "<f4").tobytes()
        weights.shape.append(3)
        yield f"weights {value}", bad
    for token in (-1, 2**31 - 1):
        bad = message(fuzzed)
        bad.data[0].model_input[0].encoded_text.tokens = np.full(3, token, "<i4").tobytes()
        yield f"token {token}", bad
    for name, change in {
        "no data": lambda m: m.ClearField("data"), "no chunk": lambda m: m.data[0].ClearField("model_input"),
        "unknown loss": lambda m: setattr(m, "loss_fn", "zap"), "seq 0": lambda m: setattr(m, "seq_id", 0),
        "no model": lambda m: setattr(m, "model_id", "nobody"), "seq -7": lambda m: setattr(m, "seq_id", -7),
        "NaN in the config": lambda m: m.loss_fn_config.update({"beta": np.nan}),
    }.items():  # fmt: skip
        bad = message(fuzzed)
        change(bad)
        yield name, bad


def test_rejects_each_invalid_message_by_name(fuzzed: Fuzzed) -> None:
    accepted = {}
    for name, item in damaged(fuzzed):
        answer = fuzzed.post("forward_backward", item.SerializeToString())
        if not 400 <= answer.status_code < 500 or len(answer.json()["detail"]) < 10:
            accepted[name] = answer.status_code
    assert accepted == {}
    fuzzed.works()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_damaged_body_is_rejected_or_runs(fuzzed: Fuzzed, draws: st.DataObject) -> None:
    """Each example uses a new model, since the damage may be in the seq_id."""
    number = next(fuzzed.seqs)
    request = {"session_id": fuzzed.session, "model_seq_id": number, "base_model": "toy"}
    fuzzed.result(fuzzed.post("create_model", request))
    body, places = bytearray(pass_body(f"{fuzzed.session}:train:{number}", 1)), st.integers(0, 2**16)
    for _ in range(draws.draw(st.integers(0, 3))):
        body[draws.draw(places) % len(body)] = draws.draw(st.integers(0, 255))
    answer = fuzzed.post("forward_backward", bytes(body[: draws.draw(places) % (len(body) + 1)]))
    assert answer.status_code < 500
    if answer.status_code == 200:
        assert fuzzed.result(answer).status_code == 200


@pytest.mark.parametrize(
    "text",
    [
        b"", b"null", b"[]", b"{", b'"x"', b"\xff\xfe", b'{"a":' * 5000, b"NaN", b'{"seq_id": NaN}',
        b'{"model_id": "x", "seq_id": 1e400}', b'{"model_id": ["x"], "seq_id": {}}',
    ],
)  # fmt: skip
def test_rejects_invalid_json_and_wrong_shapes(fuzzed: Fuzzed, text: bytes) -> None:
    for path in ("optim_step", "create_model", "asample", "retrieve_future", "save_weights", "get_info"):
        answer = fuzzed.post(path, text)
        assert 400 <= answer.status_code < 500, path
        assert answer.json()["detail"]


@pytest.mark.parametrize("seq", [2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30])
def test_rejects_numbers_beyond_64_bits(fuzzed: Fuzzed, seq: int) -> None:
    number = next(fuzzed.seqs)
    request = {"session_id": fuzzed.session, "model_seq_id": number, "base_model": "toy"}
    made = fuzzed.result(fuzzed.post("create_model", request)).json()
    answer = fuzzed.post("optim_step", {"model_id": made["model_id"], "seq_id": seq, "adam_params": {}})
    assert answer.status_code == (200 if 0 < seq < 2**63 else 400), answer.text
    ask = {"sampling_session_id": fuzzed.sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": [1]}]}}
    request = fuzzed.post("asample", {**ask, "sampling_params": {"max_tokens": 1, "seed": seq}})
    assert request.status_code == (200 if 0 <= seq < 2**63 else 400)
    odd = {
        "session_id": fuzzed.session,
        "model_seq_id": seq,
        "base_model": "toy",
        "lora_config": {"rank": 4, "seed": seq},
    }
    assert fuzzed.post("create_model", odd).status_code < 500
    fuzzed.works()


def huge_numbers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies with a number of 3,000 digits in place of an id that the client counts."""
    huge = int("9" * 3000)
    yield "create_model", {"model_seq_id": huge, "base_model": "toy"}
    yield "load_weights", {"model_seq_id": huge, "path": "tinker://x/weights/y"}
    yield "load_weights", {"seq_id": huge, "path": "tinker://x/weights/y"}
    yield "create_sampling_session", {"sampling_session_seq_id": huge, "base_model": "toy"}
    yield "save_weights_for_sampler", {"seq_id": 1, "sampling_session_seq_id": huge}
    yield "create_custom_loss", {"custom_loss_seq_id": huge, "name": "x", "inputs": [], "graph": {"nodes": []}}
    yield "copy_weights", {"source_path": "tinker://x/weights/y", "model_seq_id": huge}
    yield "optim_step", {"seq_id": huge, "adam_params": {}}
    yield "asample", {"seq_id": huge, "prompt": {"chunks": [{"tokens": [1]}]}}
    yield "retrieve_futures", {"target": {"cloned_sampler_id": huge}}
    yield "retrieve_futures", {"prev_cursor": huge}


def test_rejects_numbers_of_3000_digits(fuzzed: Fuzzed) -> None:
    ids = {"session_id": fuzzed.session, "model_id": fuzzed.model, "sampling_session_id": fuzzed.sampler}
    statuses = []
    for path, body in huge_numbers():
        target = {"sampling_session_id": fuzzed.sampler, **body.get("target", {})}
        statuses.append((path, fuzzed.post(path, {**ids, **body, "target": target}).status_code))
    assert [(path, status) for path, status in statuses if status != 400] == []
    fuzzed.works()


@pytest.mark.parametrize("timeout", ["NaN", "Infinity", "-Infinity", "-1", "1e999"])
def test_rejects_timeouts_that_are_no_duration(fuzzed: Fuzzed, timeout: str) -> None:
    target = json.dumps({"sampling_session_id": fuzzed.sampler})
    answer = fuzzed.post("retrieve_futures", f'{{"target": {target}, "timeout": {timeout}}}'.encode())
    assert answer.status_code == 400
    assert "timeout" in answer.json()["detail"]
