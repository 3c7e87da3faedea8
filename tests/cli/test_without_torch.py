"""A client that is installed without PyTorch: it runs against a server, and what needs PyTorch is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.e2e

PROGRAM = """
import sys
for name in ("torch", "peft", "accelerate", "gguf", "safetensors.torch"):
    sys.modules[name] = None  # fails to import, and importlib finds none
from tinsmith.cli import main
main()
"""
EXAMPLE = Path(__file__).parents[2] / "examples/gsm8k/tinker.yaml"
RUN = """
model: {name: tiny, rank: 2}
tasks: {train: {type: addition}, held_out: 2}
rewards: [{type: format, pattern: "(?s).*[aeiou].*"}]
sampling: {max_tokens: 3}
steps: 2
groups_per_step: 2
group_size: 8
"""


@pytest.fixture
def client(tmp_path):
    """Runs `tinsmith` without PyTorch, in a folder with run.yaml; returns its exit code and output."""
    (tmp_path / "run.yaml").write_text(RUN)

    def run(*words: str, **env: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "TINKER_BASE_URL": "", "COLUMNS": "200", **env},
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_run_against_a_server_needs_no_torch(client, tmp_path):
    with embedded(ServeConfig(engine="fake", models=("tiny",), data=tmp_path / "server")) as (url, key):
        code, text = client("run", "run.yaml", "folder=out", TINKER_BASE_URL=url, TINKER_API_KEY=key)
    assert (code, "finished: 2 steps" in text) == (0, True), text
    assert "grad_norm" in (tmp_path / "out/metrics.jsonl").read_text()


def test_files_are_read_without_torch(client):
    assert client("--help")[0] == 0
    code, text = client("check", "run.yaml")
    assert code == 0, text
    assert "TINKER_BASE_URL" in text  # a run without a server would need the engine
    assert client("config", "show", "run.yaml")[0] == 0
    code, text = client("config", "convert", str(EXAMPLE))
    assert code == 0, text


@pytest.mark.parametrize(
    "words",
    [
        ("check", "run.yaml", "algorithm.type=sppo"),
        ("serve", "--data", "data", "--port", "0"),
        ("serve", "--data", "data", "--plan"),
        ("import", "adapter", "--name", "a"),
        ("export", "tinker://a/weights/b", "--to", "out"),
        ("models", "pull", "tiny"),
    ],
    ids=lambda words: " ".join(words),
)
def test_what_needs_torch_says_so(client, words):
    code, text = client(*words)
    assert code == 2
    assert "needs PyTorch" in text
    assert "pip install 'tinsmith[serve]'" in text
    assert "Traceback" not in text


def test_doctor_names_the_extra(client):
    code, text = client("doctor", "--data", "data")
    assert code == 1
    assert "pip install 'tinsmith[serve]'" in text
    assert "ModuleNotFoundError" not in text
