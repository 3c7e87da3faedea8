"""`tinsmith prove`: the checks hold for a deterministic service, and fail where numbers differ."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.test_commands import tinsmith
from tinsmith.proof import server
from tinsmith.proof.checks import prove
from tinsmith.proof.work import Address, Record, run_work
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

RECORD = Record(
    tokens=(7,), sampled_logprobs=(-1.0,), trained_logprobs=(-1.0,), metrics=(2.0,), final_logprobs=(-0.5, -0.25)
)


def test_differences_are_named():
    other = replace(RECORD, final_logprobs=(-0.5, -0.25000003), tokens=(8,))
    assert RECORD.differences(RECORD) == []
    assert RECORD.differences(other) == ["tokens", "final_logprobs"]


def test_proof_holds_in_company(tiny_llama: Path, tmp_path: Path):
    """Of a real engine. Without `packs_requests=False` or `one_at_a_time`, the line about company fails."""
    settings = {"models": (f"tiny={tiny_llama}",), "data": tmp_path, "dtype": "float32", "threads": 1}
    with embedded(ServeConfig.model_validate({**settings, "deterministic": True})) as (url, key):
        checks = list(prove(Address(url, key, "tiny"), "float32", None))
    assert [check.passed for check in checks] == [True] * 3


@pytest.mark.slow
def test_command_prints_and_writes_a_certificate(tiny_llama: Path, tmp_path: Path):
    """With the line about kills, which restart the engine twice."""
    result = tinsmith(tmp_path, "prove", f"models=tiny={tiny_llama}", "threads=1", "--out", "proof.json")
    assert result.returncode == 0, result.stdout + result.stderr
    certificate = json.loads((tmp_path / "proof.json").read_text())
    assert [check["passed"] for check in certificate["checks"]] == [True] * 4
    assert (certificate["model"], certificate["deterministic"]) == ("tiny", True)


def test_unequal_numbers_fail_a_check(monkeypatch: pytest.MonkeyPatch):
    records = iter([RECORD, replace(RECORD, tokens=(8,)), RECORD, replace(RECORD, final_logprobs=(-0.5, -0.3))])
    monkeypatch.setattr("tinsmith.proof.checks.run_work", lambda *_: next(records))
    monkeypatch.setattr("tinsmith.proof.checks.Company", lambda _: nullcontext())
    checks = list(prove(Address("", "", "toy"), "float32", lambda: None))
    assert [check.passed for check in checks] == [True, False, True, False]
    assert ("tokens" in checks[1].result, "final_logprobs" in checks[3].result) == (True, True)


def test_work_runs_on_the_fake_engine(tmp_path: Path):
    with embedded(ServeConfig(models=("toy",), engine="fake", data=tmp_path)) as (url, key):
        record = run_work(Address(url, key, "toy"))
    assert len(record.tokens) == len(record.sampled_logprobs) == len(record.trained_logprobs) > 100
    assert len(record) > 500


def test_server_keeps_the_port_of_its_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a port is found by binding and closing a socket: another program can take it before the server."""
    ports: list[int] = []

    def start(config: ServeConfig, _log: Path) -> SimpleNamespace:
        ports.append(config.port)
        return SimpleNamespace(kill=lambda: None)

    monkeypatch.setattr(server, "start_service", start)
    monkeypatch.setattr(server, "end_service", lambda _: None)
    monkeypatch.setattr(server, "url_of", lambda *_: "http://127.0.0.1:4321")
    with server.ProofServer(ServeConfig(models=("toy",), engine="fake", data=tmp_path)) as proved:
        proved.kill()
        proved.start()
        assert proved.address.url == "http://127.0.0.1:4321"
    assert ports == [0, 4321]
