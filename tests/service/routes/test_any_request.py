"""Any JSON and any tokens, to every route: no response is a 5xx, and each error is in the form of its API."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.models import CHATML
from tests.service.support.answers import fault_of
from tests.service.support.any_json import ANY_JSON, ANY_TEXT, DEEP, HUGE, Raw, changed, encode
from tests.tokenizers import save
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded
from tools.reference import openapi

pytestmark = pytest.mark.usefixtures("forked_programs")

MODEL = "spm"
FEW = settings(
    max_examples=25, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)

CALL = {"id": "c", "type": "function", "function": {"name": "say", "arguments": '{"text": "a"}'}}
TOOL = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {"text": {}}}}}
VALID: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "the"}], "name": "a"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "of"},
        ],
        "max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "stop": ["the"], "logprobs": True, "top_logprobs": 2,
        "n": 1, "seed": 1, "tools": [TOOL], "tool_choice": "none", "stream": False, "return_token_ids": True,
        "stream_options": None, "chat_template_kwargs": {}, "logit_bias": {}, "response_format": {"type": "text"},
    },
    "/completions": {
        "prompt": [[1, 5, 300]], "max_tokens": 3, "logprobs": 3, "echo": True, "stop": "the", "stop_token_ids": [7],
        "top_k": 5, "stream": False, "include_stop_str_in_output": True, "skip_special_tokens": False,
    },
    "/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the"}]},
            {"type": "function_call", "call_id": "c", "name": "say", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "of"},
        ],
        "instructions": "the", "tools": [{"type": "function", "name": "say", "parameters": {}}], "tool_choice": "none",
        "max_output_tokens": 2, "stream": False, "metadata": {"a": "b"},
    },
    "/generate": {"token_ids": [1, 5, 300], "sampling_params": {"max_tokens": 2, "logprobs": 1, "n": 2, "stop": []}},
    "/asample": {
        "seq_id": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 5]}]}, "num_samples": 1,
        "sampling_params": {"max_tokens": 2, "stop": ["the"], "temperature": 1.0}, "prompt_logprobs": True,
    },
}  # fmt: skip
"""Further fields of a valid body, by the end of the path."""


@dataclass
class Service:
    """A served fake engine with a byte-fallback tokenizer, a session, a model and a sampling session."""

    http: httpx.Client
    ids: dict[str, str]

    def fault(self, method: str, path: str, body: bytes | None) -> str:
        url = path.format_map(_Ids(self.ids))
        return fault_of(url, self.http.request(method, url, content=body))


class _Ids(dict):
    def __missing__(self, key: str) -> str:
        return self.get(key.partition(":")[0], "x")


@pytest.fixture(scope="module")
def service(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder, data = tmp_path_factory.mktemp("spm") / "model", tmp_path_factory.mktemp("data")
    shutil.copytree(tiny_llama, folder)
    save("llama2", folder, "{% if tools %}<tool_call>{{ tools|tojson }}{% endif %}" + CHATML)
    config = ServeConfig(models=(f"{MODEL}={folder}",), engine="fake", data=data, hold_s=0.05, log_level="warning")
    with (
        embedded(config) as (url, key),
        httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=120) as http,
    ):
        session = http.post("/api/v1/create_session", json={}).json()["session_id"]
        made = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
        promise = http.post("/api/v1/create_model", json=made).json()
        http.post("/api/v1/retrieve_future", json=promise)
        http.post("/api/v1/create_sampling_session", json={**made, "sampling_session_seq_id": 0})
        model, sampler = f"{session}:train:0", f"{session}:sample:0"
        yield Service(
            http,
            {
                "session_id": session, "model_id": model, "sampling_session_id": sampler, "sampler_id": sampler,
                "base_model": MODEL, "model": MODEL, "run": model, "kind": "weights", "path": "x",
            },
        )  # fmt: skip
        assert "Traceback" not in (data / "serve.log").read_text()


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Path and fields with ids of each route with a JSON body; a session that has ended would end the test."""
    ids = ("session_id", "model_id", "sampling_session_id", "base_model", "model")
    listed = []
    for path, kind in openapi.body_models():
        more = next((fields for end, fields in VALID.items() if path.endswith(end)), {})
        if not path.endswith("/finish"):
            listed.append((path, {**{name: name for name in kind.model_fields if name in ids}, **more}))
    return listed


@pytest.mark.parametrize("end", VALID)
def test_the_bodies_are_valid_unless_changed(service: Service, end: str) -> None:
    prefix = {"/generate": "/inference/v1", "/asample": "/api/v1"}.get(end, "/v1")
    body = {**service.ids, **VALID[end]} if end == "/asample" else {"model": MODEL, **VALID[end]}
    answer = service.http.post(prefix + end, content=encode(body))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("path", "fields"), bodies(), ids=lambda value: value if isinstance(value, str) else "")
def test_changed_bodies_are_answered_in_form(service: Service, path: str, fields: dict[str, Any]) -> None:
    faults: list[tuple[str, bytes]] = []
    valid = {name: service.ids.get(value, value) if value == name else value for name, value in fields.items()}

    @FEW
    @given(st.one_of(changed(valid, st.one_of(ANY_JSON, DEEP)), ANY_JSON), st.sampled_from([False, True]))
    def check(body: Any, stream: bool) -> None:
        if stream and isinstance(body, dict) and "stream" in valid:
            body = {**body, "stream": True}
        if fault := service.fault("POST", path, encode(body)):
            faults.append((fault, encode(body)))

    check()
    assert faults == []


def all_routes() -> list[tuple[str, str]]:
    return [
        (method.upper(), path)
        for path, operations in openapi.schema()["paths"].items()
        for method in operations
        if not path.endswith(("/finish", "/end")) and "auth/apikey" not in path
    ]


def test_every_route_answers_bodies_that_are_not_json(service: Service) -> None:
    bad = (
        None,
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'"\\ud800"',
        b'{"x\\udfff": NaN}',
        b"\xef\xbb\xbf{}",
        b"\xed\xa0\x80",
    )
    routes = all_routes()
    assert len(routes) > 50
    faults = [
        (method, path, body[:20] if body else body, fault)
        for method, path in routes
        for body in bad
        if (fault := service.fault(method, path, body))
    ]
    assert faults == []


TOKENS = st.lists(st.one_of(st.integers(0, 270), st.integers(-1, 600), HUGE), max_size=10)


@settings(FEW, max_examples=60)
@given(
    tokens=TOKENS,
    echo=st.booleans(),
    stream=st.booleans(),
    seed=st.integers(0, 99),
    stop=st.lists(ANY_TEXT, max_size=2),
)
def test_any_tokens_are_completed(
    service: Service, tokens: list, echo: bool, stream: bool, seed: int, stop: list
) -> None:
    sampling = {"max_tokens": 8, "seed": seed, "ignore_eos": True, "stop": stop}
    body = {"model": MODEL, "prompt": tokens, "echo": echo, "stream": stream, **sampling}
    with_logprobs = {} if echo and stream else {"logprobs": 2}
    assert service.fault("POST", "/v1/completions", encode(body | with_logprobs)) == ""
    body = {"model": MODEL, "token_ids": tokens, "sampling_params": sampling}
    assert service.fault("POST", "/inference/v1/generate", encode(body)) == ""
    ask = {"sampling_session_id": service.ids["sampler_id"], "seq_id": 1, "prompt": {"chunks": [{"tokens": tokens}]}}
    assert service.fault("POST", "/api/v1/asample", encode({**ask, "sampling_params": {"max_tokens": 2}})) == ""


def test_numbers_that_are_not_finite_are_refused(service: Service) -> None:
    for number in (math.nan, math.inf, Raw("1e999"), Raw("-1e999")):
        body = encode({"model": MODEL, "prompt": "the", "logit_bias": {"5": number}})
        answer = service.http.post("/v1/completions", content=body)
        assert answer.status_code == 400
        assert "JSON" in answer.json()["error"]["message"]
