"""`tinsmith doctor` and `tinsmith models`, as a user meets them, on a machine in order and on one that is not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.process import child, free_port
from tinsmith.cli.catalog import cached, served
from tinsmith.cli.doctor import Finding, examine
from tinsmith.errors import ConfigError
from tinsmith.service.config import ServeConfig

KEY = "tml-x"


def config(data: Path, **changes) -> ServeConfig:
    return ServeConfig(
        **{"models": ("toy",), "engine": "fake", "data": data, "port": free_port(), "api_key": KEY} | changes
    )


def findings(settings: ServeConfig) -> dict[str, Finding]:
    return {found.place: found for found in examine(settings)}


def tinsmith(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    command = [sys.executable, "-m", "tinsmith", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env={**clean, **extra})


def test_a_machine_in_order_has_no_failure_and_nothing_is_left_behind(tmp_path: Path) -> None:
    found = findings(config(tmp_path / "new"))
    assert {place for place, one in found.items() if one.level == "fail"} == set()
    assert found["folder"].what.endswith("will be made")
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_said_with_its_cure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = config(
            tmp_path / "file" / "data", port=taken.getsockname()[1], engine="torch", models=("no/such-model",),
            threads=10_000, sampler="vllm", vllm={"python": "/no/such"}, database="postgresql+psycopg://nobody:secret@127.0.0.1:1/none",
        )  # fmt: skip
        found = findings(settings)
    levels = {place: one.level for place, one in found.items() if place not in ("memory", "disk", "sdk", "open files")}
    assert levels == {
        "python": "ok", "torch": "warn", "folder": "fail", "lock": "ok", "database": "fail", "port": "fail",
        "models": "warn", "sampler": "fail",
    }  # fmt: skip
    assert all(one.cure for one in found.values() if one.level != "ok")
    assert "make vllm" in found["sampler"].cure
    assert found["models"].cure == "tinsmith models pull no/such-model"
    assert "secret" not in str(found)


def test_a_running_server_is_known_for_one(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with child(settings) as running:
        found = findings(settings)
        assert (found["port"].level, found["lock"].level, found["database"].level) == ("ok", "warn", "ok")
        assert "Tinsmith server" in found["port"].what
        assert [one.name for one in served(running.url, KEY)] == ["toy"]
        with pytest.raises(ConfigError, match="401"):
            served(running.url, "tml-other")
        shown = tinsmith("models", "--url", running.url, "--key", KEY)
        assert "served  toy  context 32768" in shown.stdout, shown.stderr
    with pytest.raises(ConfigError, match=r"No server answers at .*Connection refused\. Start one"):
        served(running.url, KEY)
    assert tinsmith("models", "--url", running.url).returncode == 2


def test_the_exit_status_tells(tmp_path: Path) -> None:
    done = tinsmith("doctor", "--data", str(tmp_path), "--port", str(free_port()), "engine=fake")
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok    database" in done.stdout
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = tinsmith("doctor", "--data", str(tmp_path), "--port", str(taken.getsockname()[1]), "engine=fake")
    assert done.returncode == 1
    assert "fail  port" in done.stdout


def test_models_of_this_machine_are_listed_and_pulled(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path))
    (tmp_path / "smollm2-135m-instruct").symlink_to(tiny_llama)
    [found] = [one for one in cached() if one.folder.parent == tmp_path]
    assert found.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert found.size_bytes > 100_000
    done = tinsmith("models", "pull", str(tiny_llama))
    assert (done.returncode, done.stdout.strip()) == (0, str(tiny_llama.resolve()))
    refused = tinsmith("models", "pull", str(tmp_path / "none"))
    assert refused.returncode == 2
    assert "There is no folder" in refused.stderr
