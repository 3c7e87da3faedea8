"""The public API: everything here is imported from `tinsmith` alone, as plugins and scripts do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

import tinsmith

pytestmark = pytest.mark.e2e

RUN_FILE = """
model: {name: tiny, rank: 4}
tasks:
  train: {type: addition}
  held_out: 2
rewards:
  - {type: format, pattern: ".*[aeiou].*"}
sampling: {max_tokens: 4}
optimizer: {learning_rate: 0.05}
steps: 3
groups_per_step: 2
group_size: 4
service: {engine: fake, source: tiny}
"""


@pytest.fixture
def run_file(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small run with the fake engine, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    (tmp_path / "tiny").symlink_to(tiny_llama)
    file = tmp_path / "small.yaml"
    file.write_text(RUN_FILE)
    return file


def test_every_public_name_can_be_imported() -> None:
    assert {name: getattr(tinsmith, name).__name__ for name in tinsmith.__all__} == {
        name: name for name in tinsmith.__all__
    }
    assert dir(tinsmith) == tinsmith.__all__


def test_version_is_that_of_the_package() -> None:
    assert tinsmith.__version__ == version("tinsmith")


@pytest.mark.parametrize("module", ["tinsmith", "tinsmith.cli"])
def test_import_is_lazy(module: str) -> None:
    """Also that of the command line, of which --help is a tenth of a second beside what these packages take."""
    packages = ("torch", "tinker", "pydantic", "omegaconf", "numpy", "rich", "importlib.metadata")
    program = f"import sys, {module}; print([name for name in {packages} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_names_raise_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = tinsmith.Trainer  # type: ignore[attr-defined]


def test_train_runs_a_file_to_its_end(run_file: Path) -> None:
    result = tinsmith.train(run_file, "steps=2")
    assert result.step == 2
    assert result.folder == Path("runs/small")
    assert result.sampling_path.startswith("tinker://")
    metrics = tinsmith.read_metrics(result.folder)
    assert [row["step"] for row in metrics if "reward/mean" in row] == [1, 2]
    assert tinsmith.train(run_file, "steps=2") == result  # a finished run is left as it is


async def _train_by_hand(run_file: Path) -> list[float]:
    """The built-in loop, written out with public parts."""
    rewards = []
    async with tinsmith.open_run(run_file, "folder=by-hand") as run:
        assert not await run.evaluate_before_training()
        for step in run.steps():
            batch = await run.next_batch(step)
            groups = run.filtered_groups(batch.groups)
            update = await run.algorithm.score(step, groups, run.next_demonstrations())
            await run.update(step, update)
            rewards.append(sum(map(sum, (group.rewards for group in groups))))
            if await run.finish_step(step):
                break
    return rewards


def test_a_loop_of_ones_own_equals_the_built_in_loop(run_file: Path) -> None:
    rewards = asyncio.run(_train_by_hand(run_file))
    result = tinsmith.train(run_file)
    built_in = [row["reward/mean"] * 8 for row in tinsmith.read_metrics(result.folder) if "reward/mean" in row]
    assert rewards == pytest.approx(built_in)


def test_train_refuses_modes_without_training(run_file: Path) -> None:
    with pytest.raises(Exception, match="mode explore does not train"):
        tinsmith.train(run_file, "mode=explore", "buffer.type=file", "model.base_url=http://127.0.0.1:9")


def test_a_reward_of_ones_own_is_a_function() -> None:
    @tinsmith.reward("brief")
    def brief(task: tinsmith.Task, rollout: tinsmith.Rollout) -> float:
        return float(len(rollout.text) < 5)

    task = tinsmith.Task(id="1", messages=(tinsmith.Message(role="user", content="2 + 2?"),), answer="4")
    turn = tinsmith.Turn(prompt=(1,), tokens=(2,), logprobs=(-0.1,), text="4", stop="stop")
    assert brief(task, tinsmith.Rollout.single((turn,))) == 1.0


def test_embedded_serves_the_tinker_api(tmp_path: Path, tiny_llama: Path) -> None:
    config = tinsmith.ServeConfig(models=(f"tiny={tiny_llama}",), data=tmp_path / "data", engine="fake")
    with tinsmith.embedded(config) as (url, key):
        models = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
