"""The examples run with the fake engine, which needs no model: a dry run of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinsmith
from tests.rl.scripted_run import rows
from tinsmith.rl.data.countdown import countdown_row
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT)
    for kind in ("yaml", "toml")
    for path in ROOT.glob(f"examples/**/*.{kind}")
    if path.parent.name != "cluster"  # manifests of Kubernetes
)
MODELS = sorted(
    {
        name
        for file in FILES
        for name in re.findall(r"[\w-]+/(?:SmolLM2|Qwen3|Llama-3)[\w.-]+", (ROOT / file).read_text())
    }
)
ROW = {"question": "How many is 2 + 2?", "answer": "<<2+2=4>>4\n#### 4", "problem": "2 + 2?", "solution": "4"}
SMALL = ("group_size=2", "groups_per_step=2", "monitors=[]", "sampling.max_tokens=8", "checkpoint.every=1")
STAGES = ("stages.0.steps=1", "stages.1.steps=1", "stages.0.demonstrations.per_step=2")
TRINITY = ("buffer.total_steps=2", "group_size=2", "groups_per_step=2", "sampling.max_tokens=8", "monitors=[]")
MINDS = ("trainer.rollouts_per_example=2", "trainer.groups_per_batch=2", "trainer.total_batches=2", "monitors=[]")
OVERRIDES = {
    "examples/addition.yaml": (*SMALL, "steps=2", "tasks.held_out=2"),
    "examples/countdown.yaml": (*SMALL, "steps=2", "tasks.train.size=20", "tasks.held_out=2"),
    "examples/countdown/train.yaml": (*SMALL, "steps=2", "tasks.held_out=2"),
    "examples/delayed_reward.yaml": ("steps=10", "groups_per_step=2", "monitors=[]"),
    "examples/delayed_reward/baseline.yaml": ("steps=2", "groups_per_step=2", "monitors=[]"),
    "examples/mixture.yaml": (*SMALL, "steps=2", *(f"environments.{number}.held_out=2" for number in range(3))),
    "examples/introspection.yaml": (*SMALL, "steps=2", "eval.limit=2"),
    "examples/minds/gradient_choice.yaml": (*SMALL, "steps=2", "sampling.max_tokens=4", "eval.limit=2"),
    "examples/minds/gradient_intuition_sums.yaml": (*SMALL, "steps=2", "eval.limit=2"),
    "examples/minds/self_prediction_smollm2.yaml": (*SMALL, "steps=2", "eval.limit=2"),
    "examples/minds/entropy_intuition.toml": (*MINDS, "env.args.held_out=2", "trainer.args.max_new_tokens=8"),
    "examples/minds/ghost_trace.toml": (*MINDS, "env.args.held_out=2", "trainer.args.max_new_tokens=8"),
    "examples/minds/gradient_intuition.toml": (*MINDS, "env.args.held_out=2", "trainer.args.max_new_tokens=8"),
    "examples/minds/gradient_prophet.toml": (*MINDS, "env.args.held_out=2", "trainer.args.max_new_tokens=8"),
    "examples/minds/self_prediction.toml": (*MINDS, "env.args.held_out=2", "trainer.args.max_new_tokens=8"),
    "examples/minds/multi_task.toml": (*MINDS, "trainer.args.max_new_tokens=8", "eval.limit=2"),
    "examples/minds/verifiers_gym.toml": (*MINDS, "env.args.num_examples=8", "environments.0.held_out=2"),
    "examples/verifiers/gym.yaml": (*SMALL, "steps=2", "environments.0.held_out=2", "environments.1.held_out=2"),
    "examples/own_data.toml": (*SMALL, "steps=2", "tasks.held_out=2"),
    "examples/solver_judge/arithmetic.yaml": (*SMALL, "steps=2", "tasks.held_out=2"),
    "examples/sft_then_grpo.yaml": (*SMALL, *STAGES, "tasks.held_out=2"),
    "examples/gsm8k/arithmetic.yaml": (*SMALL, "steps=2", "tasks.held_out=2"),
    "examples/gsm8k/smollm2.yaml": (*SMALL, *STAGES, "tasks.held_out=2"),
    "examples/gsm8k/qwen3.yaml": (*SMALL, "steps=2", "tasks.held_out=2"),
    "examples/gsm8k/tinker.yaml": TRINITY,
    "examples/gsm8k/verl.yaml": TRINITY,
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A service with the fake engine for every model of the examples; the machine has none of their files."""
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINSMITH_CACHE", str(folder / "cache"))
        patch.setenv("HF_HUB_CACHE", str(folder / "hub"))
        with embedded(ServeConfig(models=tuple(MODELS), engine="fake", data=folder / "data")) as served:
            yield served


def test_every_example_has_a_dry_run():
    assert sorted(OVERRIDES) == sorted(map(str, FILES))


@pytest.mark.parametrize("file", OVERRIDES)
def test_example_runs_without_a_model(file, address, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    numbered = [{**ROW, "question": f"{number}: {ROW['question']}", "problem": f"{number} + 2"} for number in range(12)]
    countdown = [countdown_row(number, [1, 2, number]) for number in range(12)]
    folders = {"": numbered, "openai/gsm8k/main": numbered, "data/countdown": countdown}
    for folder, data in folders.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name in ("problems", "train", "test"):
            (tmp_path / folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_BASE_URL", address[0])
    monkeypatch.setenv("TINKER_API_KEY", address[1])
    result = tinsmith.train(file, *OVERRIDES[file], f"folder={tmp_path / 'run'}")
    sampled = [row for row in rows(result.folder) if "reward/mean" in row]
    assert [row["rollouts/failed"] for row in sampled] == [0] * len(sampled)
    assert sampled


def test_service_engine_fake_needs_no_model(tmp_path, monkeypatch):
    for name in ("TINSMITH_CACHE", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    words = (*OVERRIDES["examples/addition.yaml"], "service.engine=fake", f"folder={tmp_path / 'run'}")
    assert tinsmith.train(ROOT / "examples" / "addition.yaml", *words).step == 2
