"""The two published files, unchanged: one for the Tinker backend, one for LoRA with verl. Each is read, and runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.trinity.conftest import Server
from tests.integrations.trinity.files import TINKER, VERL
from tinsmith.cli import TRAINED_NOTHING
from tinsmith.dialects import find_dialect, read_run
from tinsmith.rl.config import RunConfig
from tinsmith.rl.data.sources import Hub
from tinsmith.settings import parse_file

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

ROOT = Path(__file__).parents[3]
SHORT = ("groups_per_step=2", "group_size=2", "sampling.max_tokens=4", "sampling.max_prompt_tokens=4000")


@pytest.fixture(autouse=True)
def no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_CHECKPOINT_ROOT_DIR", raising=False)


@pytest.mark.parametrize("file", [TINKER, VERL], ids=lambda file: file.stem)
def test_published_file_is_translated(file: Path):
    run_file = read_run(file)
    run = run_file.settings
    assert run_file.dialect == "Trinity-RFT"
    assert run.model.name == "meta-llama/Llama-3.2-3B"
    assert run.model.rank == 32
    assert run.model.chat_template.startswith("{{- bos_token }}")
    assert (run.algorithm.type, run.group_size, run.groups_per_step, run.epochs) == ("grpo_std", 8, 96, 1)
    assert run.algorithm.kl.coef == 0.0
    assert not run.algorithm.columns
    assert run.algorithm.aggregate == "token_mean"
    assert (run.optimizer.learning_rate, run.optimizer.weight_decay, run.optimizer.grad_clip_norm) == (1e-5, 0.01, 1.0)
    assert (run.optimizer.beta1, run.optimizer.beta2, run.optimizer.schedule) == (0.9, 0.999, "constant")
    assert (run.sampling.max_prompt_tokens, run.sampling.max_tokens) == (1024, 2048)
    assert (run.staleness, run.rollout.concurrency, run.seed) == (1, 64, 42)
    assert run.checkpoint.every == 100
    source = run.tasks.sources[0]
    assert isinstance(source, Hub)
    assert (source.name, source.subset, source.split) == ("openai/gsm8k", "main", "train")
    assert (source.prompt, source.answer, run.tasks.order.type) == ("{question}", "{answer}", "sequential")
    assert run.workflow.type == "math"
    assert [reward.type for reward in run.rewards] == ["math"]
    assert run.folder == f"checkpoints/Trinity-RFT-gsm8k/alignment-tinker/{run.name}"


def test_published_files_differ_in_their_adapter():
    by_tinker, by_lora = read_run(TINKER).settings, read_run(VERL).settings
    assert by_tinker.model.train_unembed
    assert not by_lora.model.train_unembed
    assert (by_tinker.optimizer.eps, by_lora.optimizer.eps) == (1e-12, 1e-8)
    assert [monitor.type for monitor in by_tinker.monitors] == ["console", "report", "wandb"]
    different = {key for key, value in by_tinker if value != getattr(by_lora, key)}
    assert different == {"model", "optimizer", "name", "folder", "monitors"}


def test_checkpoint_folder_reads_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", "/tmp/kept")
    assert read_run(TINKER).settings.folder.startswith("/tmp/kept/Trinity-RFT-gsm8k/")


def test_overrides_set_keys_of_tinsmith():
    run = read_run(TINKER, ["steps=2", "groups_per_step=4", "model.rank=8", "service.source=tiny"]).settings
    assert (run.steps, run.groups_per_step, run.model.rank, run.service.source) == (2, 4, 8, "tiny")


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.stem)
def test_example_files_are_recognized(file: Path):
    assert (find_dialect(parse_file(file)) is None) == (read_run(file).dialect == "")
    assert isinstance(read_run(file).settings, RunConfig)


def tinsmith(place: Path, server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    url, key = server
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "TRINITY_", "WANDB_"))
    }
    variables = {"TINKER_BASE_URL": url, "TRINITY_API_KEY": key, "HF_HOME": str(place / "hf"), "HF_HUB_OFFLINE": "1"}
    variables |= {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "tinsmith", *words]
    return subprocess.run(
        command, cwd=place, env={**clean, **variables}, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize("file", [TINKER, VERL], ids=lambda file: file.stem)
def test_published_file_trains_saves_and_resumes(file: Path, place: Path, server: Server):
    before = file.read_bytes()
    done = tinsmith(place, server, "run", "--config", str(file), *SHORT, "steps=2", "checkpoint.every=1")
    assert done.returncode == TRAINED_NOTHING, done.stdout + done.stderr  # four tokens of a fake model are never right
    assert "a file of Trinity-RFT" in done.stdout
    assert "cluster.node_num, cluster.gpu_per_node" in " ".join(done.stdout.split())
    (folder,) = (place / "checkpoints" / "Trinity-RFT-gsm8k" / "alignment-tinker").iterdir()
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 2
    assert state["path"].startswith("tinker://")
    first = json.loads((folder / "rollouts" / "train-000001.jsonl").read_text().splitlines()[0])
    assert "What is 0 + 3?" in json.dumps(first)  # in the file's order
    assert file.read_bytes() == before
    if file == VERL:
        return
    resumed = tinsmith(place, server, "run", "--config", str(file), *SHORT, "steps=3", "checkpoint.every=1")
    assert resumed.returncode == TRAINED_NOTHING, resumed.stdout + resumed.stderr
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
