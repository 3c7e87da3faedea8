"""An exception that nothing handles: a response in the API's form, whose id is in the log with the traceback."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.service.support.answers import fault_of
from tests.service.support.inprocess import api
from tinsmith.chat.errors import as_tinsmith_error
from tinsmith.chat.strict_json import encode_json
from tinsmith.errors import BadRequest, InternalError, TinsmithError
from tinsmith.service.concurrency import LARGE_BYTES
from tinsmith.service.limits.decoders import Decoders
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.openai import responses_api, routes
from tinsmith.service.service import Service
from tinsmith.service.wire.errors import is_openai_path

SAY = {"model": "toy", "prompt": "ab", "max_tokens": 3}


class Panic(BaseException):
    """What Rust libraries raise: no Exception."""


def fail(*_: object, **__: object) -> None:
    raise KeyError("half an emoji: \ud83d")


def panic(*_: object, **__: object) -> None:
    raise Panic("index out of bounds")


def check_logged(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """The id in `text` is in the log, once, with a traceback."""
    (request_id,) = set(re.findall(r"req-\w+", text))
    (record,) = [record for record in caplog.records if request_id in record.getMessage()]
    assert record.exc_info
    caplog.clear()


@pytest.mark.parametrize("fault", [fail, panic])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/api/v1/asample"),
        ("POST", "/api/v1/create_session"),
        ("GET", "/api/v1/training_runs"),
    ],
)
def test_fault_of_a_dependency_is_answered_in_form(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    fault: Any,
) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            monkeypatch.setattr(Service, "authenticate", fault)
            answer = await app.send(method, path, SAY)
            assert answer.status_code == 500
            assert answer.headers["content-type"] == "application/json"
            body = answer.json()
            message = body["error"]["message"] if is_openai_path(path) else body["detail"]
            check_logged(message, caplog)
            assert answer.headers["x-request-id"] in message
            monkeypatch.undo()
            assert (await app.send("POST", "/v1/completions", SAY)).status_code == 200

    asyncio.run(main())


def test_open_stream_ends_with_an_error_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            monkeypatch.setattr(routes, "text_choice", fail)
            answer = await app.send("POST", "/v1/completions", {**SAY, "stream": True})
            *_, error, done, rest = answer.text.split("\n\n")
            assert (answer.status_code, done, rest) == (200, "data: [DONE]", "")
            body = json.loads(error.removeprefix("data: "))["error"]
            assert body["type"] == "server_error"
            check_logged(body["message"], caplog)
            monkeypatch.setattr(responses_api, "_choice_events", panic)
            answer = await app.send("POST", "/v1/responses", {"model": "toy", "input": "ab", "stream": True})
            event = answer.text.strip().split("\n\n")[-1]
            assert event.startswith("event: response.failed\n")
            check_logged(event, caplog)

    asyncio.run(main())


def test_errors_outside_of_the_routes_are_answered_in_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            monkeypatch.setattr(Telemetry, "http_finished", fail)
            monkeypatch.setattr(Service, "authenticate", fail)
            with pytest.raises(KeyError):  # starlette raises again what fails outside of the app's middleware
                await app.send("GET", "/v1/models", b"")
            assert "Request id: req-" in caplog.text

    asyncio.run(main())


def test_message_that_cannot_be_encoded_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BadRequest("There is no \ud83d.", "Send \udc00.")

    async def main() -> None:
        async with api(tmp_path) as app:
            monkeypatch.setattr(Service, "authenticate", refuse)
            for path in ("/v1/completions", "/api/v1/asample", "/api/v1/create_session"):
                answer = await app.send("POST", path, SAY)
                assert answer.status_code == 400
                assert fault_of(path, answer) == ""
                assert "There is no \N{REPLACEMENT CHARACTER}." in answer.text

    asyncio.run(main())


def test_fault_in_a_decoder_process_has_its_traceback() -> None:
    async def main() -> None:
        decoders = Decoders(1)
        try:
            with pytest.raises(RuntimeError, match=r"(?s)Traceback.*ValueError"):
                await decoders.run(LARGE_BYTES + 1, int, "no number")
        finally:
            decoders.close()

    asyncio.run(main())


def test_tinsmith_errors_stay_as_they_are(own_log: pytest.LogCaptureFixture) -> None:
    error = TinsmithError("It failed.")
    assert as_tinsmith_error(error, "A request") is error
    assert not own_log.records
    made = as_tinsmith_error(RecursionError("deep"), "A request")
    assert isinstance(made, InternalError)
    assert made.request_id in str(made)
    assert own_log.records[0].levelno == logging.ERROR


def test_json_of_responses_can_always_be_encoded() -> None:
    for text in ("a", "é😀", "\ud83d", "\ude00\ud83d", "x\ud83d\ude00y"):
        assert json.loads(encode_json({text: [text]}).encode()) == {
            key: [key] for key in [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")]
        }
    with pytest.raises(ValueError, match="JSON"):
        encode_json(float("nan"))


def test_connection_is_usable_after_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with api(tmp_path, over_http=True) as app:
            monkeypatch.setattr(routes, "resolve_model", fail)
            for _ in range(3):
                answer = await app.send("GET", "/v1/models", b"")
                assert (answer.status_code, fault_of("/v1/models", answer)[:3]) == (500, "500")
                assert "connection" not in answer.headers

    asyncio.run(main())
