"""Logs contain no key, token, signature or password, in either format, at debug level."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import tinker

from tests.service.conftest import datum
from tests.service.support.databases import url_of
from tests.service.support.process import child, free_port
from tinsmith.service.config import ServeConfig
from tinsmith.service.observability.logs import JsonLines, TextLines
from tinsmith.service.tenancy.keys import create_key, open_key_database

pytestmark = pytest.mark.usefixtures("forked_programs")

OWN = "tml-own-key-of-the-server"
WRONG = "tml-key-that-nobody-made"


def make_key(data: Path) -> str:
    async def main() -> str:
        async with open_key_database(data, url_of(data)) as engine:
            return (await create_key(engine, "alice", "alice"))[0]

    return asyncio.run(main())


def use_service(url: str, key: str) -> list[str]:
    """Use the service as a client does, invalid requests included. Returns the secrets involved."""
    client = tinker.ServiceClient(base_url=url, api_key=key)
    model = client.create_lora_training_client("toy", rank=4).result()
    model.forward_backward([datum([5, 6, 7])], "cross_entropy").result()
    path = model.save_state("kept").result().path
    model.save_weights_and_get_sampling_client().result().compute_logprobs(tinker.ModelInput.from_ints([5, 6])).result()
    secrets = [key, OWN, WRONG]
    with httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=40) as http:
        run = path.split("/")[2]
        at = f"training_runs/{run}/checkpoints"
        secrets.append(http.post(f"{at}/weights/kept/access_token", json={}).json()["weights_access_token"])
        secrets.append(http.post("auth/token").json()["jwt"])
        save = {"model_id": run, "seq_id": 90, "path": "out"}
        http.post("retrieve_future", json=http.post("save_weights_external", json=save).json())
        links = http.get(f"{at}/external_weights/out/external_weights_urls").json()["urls"].values()
        for link in links:
            assert httpx.get(link, timeout=60).status_code == 200
            [signature] = parse_qs(urlsplit(link).query)["signature"]
            secrets.append(signature)
            assert httpx.get(link.replace(signature[:8], "0" * 8), timeout=60).status_code == 404
        mistakes = [
            http.post("create_session", json={}, headers={"X-API-Key": WRONG}),
            http.post("retrieve_future", json={"request_id": key}),
            http.post("weights_info", json={"tinker_path": f"tinker://{key}/weights/{secrets[3]}"}),
            http.post("load_weights", json={"session_id": key, "model_seq_id": 0, "path": path, "optimizer": 1}),
            http.post("load_weights", json={"weights_access_token": WRONG, "model_id": run, "path": path}),
            http.get(f"samplers/{secrets[4]}"),
            http.post("asample", content=f'{{"seq_id": "{key}"}}'),
        ]
        assert {400 <= answer.status_code < 500 for answer in mistakes} == {True}
    client.close("success").result()
    return secrets


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_of_a_run_contains_no_secret(tmp_path: Path, form: str) -> None:
    key = make_key(tmp_path)
    options = {"models": ("toy",), "engine": "fake", "data": tmp_path, "api_key": OWN, "port": free_port()}
    config = ServeConfig(**options, log_format=form, log_level="debug")  # type: ignore[arg-type]
    with child(config) as served:
        secrets = use_service(served.url, key)
        served.kill()
    with child(config):
        pass
    log = (tmp_path / "log").read_text()
    assert "forward_backward" in log, "the log names the calls"
    assert "***" in log, "secrets of refused requests are masked"
    assert [secret for secret in secrets if secret in log] == []


def test_secrets_in_messages_and_tracebacks_are_masked() -> None:
    try:
        raise ValueError(
            "cannot connect to postgresql+psycopg://me:hunter2@db/name with tml-abc-DEF_9 or eyJhb.eyJz.x-y"
        )
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "GET /files/a?signature=0af3 failed: %s", "args": (error,)})
        record.exc_info = (ValueError, error, error.__traceback__)
    for form in (TextLines(), JsonLines()):
        line = form.format(record)
        assert "ValueError" in line
        assert not [secret for secret in ("hunter2", "tml-abc", "eyJhb", "eyJz", "0af3") if secret in line]
        assert "@db/name" in line
