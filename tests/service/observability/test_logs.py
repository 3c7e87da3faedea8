"""Log lines in text and JSON: context, masking, and which requests are logged."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.service.support.inprocess import KEY, api, pass_body
from tests.service.support.process import child, free_port
from tinsmith.service.config import ServeConfig
from tinsmith.service.observability.logs import JsonLines, TextLines, add_log_context, log_context


def record(message: str, *values: object) -> logging.LogRecord:
    return logging.LogRecord("tinsmith.x", logging.INFO, "file", 1, message, values, None)


def test_text_lines_are_single_and_end_with_their_context() -> None:
    lines = TextLines(bare=True)
    assert lines.format(record("plain")) == "plain"
    with log_context("s1:train:0:4", "ann"):
        assert lines.format(record("slow")) == "slow [request=s1:train:0:4 session=s1 owner=ann]"
        with log_context():
            add_log_context(owner="ben")
            assert lines.format(record("x\n2026 INFO forged\x1b[31m")) == "x\\x0a2026 INFO forged\\x1b[31m [owner=ben]"
    assert lines.format(record("plain")) == "plain"


def test_json_lines_contain_context_and_traceback() -> None:
    try:
        raise ValueError("inner")
    except ValueError as error:
        failed = record("bad %s", "luck")
        failed.exc_info = (type(error), error, error.__traceback__)
    with log_context("s1:sample:0:9", "ann"):
        line = json.loads(JsonLines().format(failed))
    assert line["message"] == "bad luck"
    assert (line["request_id"], line["session_id"], line["owner"]) == ("s1:sample:0:9", "s1", "ann")
    assert line["exception"].endswith("ValueError: inner")
    assert "request_id" not in json.loads(JsonLines().format(record("plain")))


def test_tasks_inherit_the_log_context_of_their_request(caplog: pytest.LogCaptureFixture) -> None:
    async def inner() -> str:
        await asyncio.sleep(0)
        return TextLines(bare=True).format(record("later"))

    async def main() -> list[str]:
        with log_context("a:sample:0:1"):
            first = asyncio.create_task(inner())
        with log_context("b:sample:0:1"):
            second = asyncio.create_task(inner())
        return [await first, await second]

    first, second = asyncio.run(main())
    assert "session=a" in first
    assert "session=b" in second


def test_refused_requests_are_logged_and_done_ones_at_debug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tinsmith")
    caplog.handler.setFormatter(JsonLines())

    async def main() -> str:
        async with api(tmp_path) as app:
            model = await app.model()
            await app.result((await app.post("forward_backward", pass_body(model, 1))).json())
            await app.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"beta1": 7}})
            return model

    model = asyncio.run(main())
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    [refused] = [line for line in lines if "refused with 400" in line["message"]]
    assert refused["message"].startswith("POST /optim_step")
    assert (refused["request_id"], refused["owner"]) == (f"{model}:2", "local")
    [done] = [line for line in lines if line["message"].startswith("forward_backward done: submit")]
    assert (done["request_id"], done["level"]) == (f"{model}:1", "debug")


def test_requests_to_vllm_are_not_logged() -> None:
    """httpx logs each at INFO, and vLLM's /health and /metrics are read every few seconds. In a process of its own,
    since logging is configured once."""
    program = (
        "import logging; from tinsmith.service.observability.logs import configure_logging;"
        "configure_logging('text', 'info');"
        "logging.getLogger('httpx').info('HTTP Request'); logging.getLogger('tinsmith.x').info('Loading')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Loading" in done.stderr
    assert "HTTP Request" not in done.stderr


def test_json_log_of_a_server_is_valid_and_contains_no_key(tmp_path: Path) -> None:
    settings = ServeConfig(
        models=("toy",), engine="fake", data=tmp_path, api_key=KEY, port=free_port(), log_format="json"
    )
    with child(settings) as running:
        for key in (KEY, "tml-guessed"):
            httpx.post(
                f"{running.url}/api/v1/get_info", json={"model_id": "none"}, headers={"X-API-Key": key}, timeout=60
            )
        running.popen.terminate()
        assert running.popen.wait(120) == 0
    text = (tmp_path / "log").read_text()
    messages = [json.loads(line)["message"] for line in text.splitlines()]
    assert [line.partition(":")[0] for line in messages if "refused" in line] == [
        "POST /get_info refused with 404",
        "POST /get_info refused with 401",
    ]
    assert KEY not in text
    assert "tml-guessed" not in text
