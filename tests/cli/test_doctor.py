"""`tinsmith doctor` and `tinsmith models`, on a working machine and on a broken one."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.service.support.process import child, free_port
from tinsmith.cli import catalog, machine
from tinsmith.cli.catalog import _details, cached, served
from tinsmith.cli.doctor import Finding, run_checks
from tinsmith.cli.doctor_cluster import run_cluster_checks
from tinsmith.errors import ConfigError
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.e2e

KEY = "tml-x"


def config(data: Path, **changes) -> ServeConfig:
    """Settings of a service with the fake engine on a free port."""
    return ServeConfig(
        **{"models": ("toy",), "engine": "fake", "data": data, "port": free_port(), "api_key": KEY} | changes
    )


def findings(settings: ServeConfig) -> dict[str, Finding]:
    """Findings of the doctor by check."""
    return {finding.check: finding for finding in run_checks(settings)}


def tinsmith(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `extra` are environment variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    command = [sys.executable, "-m", "tinsmith", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env={**clean, **extra})


def test_working_machine_has_no_failures_and_no_leftovers(tmp_path: Path) -> None:
    results = findings(config(tmp_path / "new"))
    assert {check for check, finding in results.items() if finding.level == "fail"} == set()
    assert results["folder"].message.endswith("will be created")
    assert list(tmp_path.iterdir()) == []


def test_findings_name_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = config(
            tmp_path / "file" / "data", port=taken.getsockname()[1], engine="torch", models=("no/such-model",),
            threads=10_000, sampler="vllm", vllm={"python": "/no/such"}, database="postgresql+psycopg://nobody:secret@127.0.0.1:1/none",
        )  # fmt: skip
        results = findings(settings)
    levels = {
        check: finding.level
        for check, finding in results.items()
        if check not in ("memory", "disk", "sdk", "open files")
    }
    assert levels == {
        "python": "ok", "torch": "warn", "compiler": "ok", "folder": "fail", "lock": "ok", "database": "fail",
        "port": "fail", "models": "warn", "plan": "ok", "sampler": "fail",
    }  # fmt: skip
    assert all(finding.fix for finding in results.values() if finding.level != "ok")
    assert "make vllm" in results["sampler"].fix
    assert results["models"].fix == "tinsmith models pull no/such-model"
    assert "secret" not in str(results)


def test_database_that_no_server_would_open_is_a_failure(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "tinsmith.db")) as db:
        db.executescript("create table alembic_version (version_num text); insert into alembic_version values ('0005')")
    result = findings(config(tmp_path))["database"]
    assert (result.level, "is of version 0005" in result.message) == ("fail", True)


def test_gpu_needs_a_recent_torch_and_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC.")

    settings = config(tmp_path, engine="torch", device="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch, "compile", without_compiler)
    for version, level in (("2.10.1+cu128", "fail"), ("2.11.0+cu130", "ok")):
        monkeypatch.setattr(torch, "__version__", version)
        results = findings(settings)
        assert results["torch"].level == level
        assert "NVIDIA H100" in results["torch"].message
    assert results["compiler"].level == "warn"
    assert "C compiler" in results["compiler"].message
    assert "gcc" in results["compiler"].fix


def test_version_of_vllm_is_shown(tmp_path: Path) -> None:
    cases = (("old", "echo 0.32.0", "ok", "vLLM 0.32.0 in"), ("none", "exit 1", "fail", "no vLLM"))
    for name, program, level, text in cases:
        python = tmp_path / name
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
        finding = findings(config(tmp_path / "data", engine="torch", sampler="vllm", vllm={"python": python}))[
            "sampler"
        ]
        assert (finding.level, text in finding.message) == (level, True)


def test_model_folder_that_does_not_exist_is_a_failure(tmp_path: Path) -> None:
    finding = findings(config(tmp_path, engine="torch", models=("judge=/no/such",)))["models"]
    assert (finding.level, finding.message) == ("fail", "There is no folder /no/such.")
    assert "hub id" in finding.fix


def test_running_server_is_recognized(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with child(settings) as running:
        results = findings(settings)
        assert (results["port"].level, results["lock"].level, results["database"].level) == ("ok", "warn", "ok")
        assert "Tinsmith server" in results["port"].message
        assert [model.name for model in served(running.url, KEY)] == ["toy"]
        with pytest.raises(ConfigError, match="401"):
            served(running.url, "tml-other")
        shown = tinsmith("models", "--url", running.url, "--key", KEY)
        assert "served  toy  context 32768" in shown.stdout, shown.stderr
    with pytest.raises(ConfigError, match=r"No server responds at .*Connection refused\. Start one"):
        served(running.url, KEY)
    assert tinsmith("models", "--url", running.url).returncode == 2


def test_exit_status_reflects_failures(tmp_path: Path) -> None:
    done = tinsmith("doctor", "--data", str(tmp_path), "--port", str(free_port()), "--model", "toy", "engine=fake")
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok    database" in done.stdout
    assert "ok    models      toy, without weights" in done.stdout
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = tinsmith("doctor", "--data", str(tmp_path), "--port", str(taken.getsockname()[1]), "engine=fake")
    assert done.returncode == 1
    assert "fail  port" in done.stdout


def test_models_lists_and_pulls_local_models(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path))
    (tmp_path / "smollm2-135m-instruct").symlink_to(tiny_llama)
    [model] = [entry for entry in cached() if entry.folder.parent == tmp_path]
    assert model.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert model.size_bytes > 100_000
    done = tinsmith("models", "pull", str(tiny_llama))
    assert (done.returncode, done.stdout.strip()) == (0, str(tiny_llama.resolve()))
    refused = tinsmith("models", "pull", str(tmp_path / "none"))
    assert refused.returncode == 2
    assert "There is no folder" in refused.stderr


def test_models_say_that_they_take_images() -> None:
    model = {"arch": "qwen3_vl", "path": "fast", "dtype": "float32", "device": "cpu", "weight_bytes": 0}
    model |= {"context_limit": "", "general_path_fault": "", "parameters_per_rank": {}, "images": True}
    assert _details(model) == "qwen3_vl, fast path, float32 on cpu, takes images"
    assert _details(model | {"images": False}) == "qwen3_vl, fast path, float32 on cpu"


def test_models_warn_of_a_model_that_should_be_on_the_fast_path() -> None:
    model = {"arch": "llama", "path": "general", "dtype": "float32", "device": "cuda", "weight_bytes": 0}
    model |= {"context_limit": "", "general_path_fault": "It fails.", "parameters_per_rank": {}, "images": False}
    first, warning = _details(model).splitlines()
    assert first == "llama, general path, float32 on cuda"
    assert warning == "WARNING: several times slower than on the fast path. It fails."


def test_model_that_failed_to_load_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [
        {"name": "toy", "source": "toy", "state": "up", "error": "", "model": None},
        {"name": "judge", "source": "/no", "state": "failed", "error": "There is no folder /no.", "model": None},
    ]
    capabilities = {"supported_models": [{"model_name": "toy", "max_context_length": 512}]}
    answers = {"admin/base_models": {"base_models": models}, "get_server_capabilities": capabilities}
    monkeypatch.setattr(catalog, "_call", lambda method, url, key, path: answers[path])
    machine.show()
    shown = capsys.readouterr().out
    assert "served  toy  context 512\n" in shown
    assert "failed  judge  There is no folder /no.\n" in shown


def test_models_are_loaded_into_a_running_server(tmp_path: Path) -> None:
    with embedded(ServeConfig(models=("toy",), engine="fake", data=tmp_path)) as (url, key):
        server = ["--url", url, "--key", key]
        loaded = tinsmith("models", "load", "judge=two", *server)
        assert (loaded.returncode, loaded.stdout) == (0, "judge is served\n"), loaded.stderr
        shown = tinsmith("models", *server).stdout
        assert "served  judge" in shown
        assert "fast path, float32 on cpu" in shown
        assert "unembed: lm_head; " in shown
        assert "Unload it first" in tinsmith("models", "load", "judge", *server).stderr
        assert tinsmith("models", "unload", "judge", *server).returncode == 0
        assert "judge" not in tinsmith("models", *server).stdout
        assert "not served here" in tinsmith("models", "unload", "judge", *server).stderr


def test_cluster_without_ray_is_a_finding() -> None:
    """Fails if `doctor --cluster` imports Ray before it is known to be installed."""
    if find_spec("ray") is not None:
        pytest.skip("Ray is installed")
    (finding,) = run_cluster_checks(ServeConfig.model_validate({"cluster": {"address": "auto"}}))
    assert finding.level == "fail"
    assert "tinsmith[cluster]" in finding.fix
