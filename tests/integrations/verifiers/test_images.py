"""An environment of verifiers with images: a tiny vision-language model is served, sampled and trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.verifiers.test_verifiers import package
from tests.rl.scripted_run import run
from tests.vision import IMAGE, save_vision_model
from tinsmith import read_metrics
from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded


@pytest.fixture(scope="module", autouse=True)
def needs_verifiers() -> None:
    """Skips the module without the package, which takes seconds to import."""
    pytest.importorskip("verifiers.v1")


def squares(folder: Path, **args: Any) -> RunConfig:
    """A run of 2 steps on pictures in the prompt and in the user's second message."""
    environment = {"type": "verifiers", "id": package("squares.py"), "held_out": 0, "args": args}
    return RunConfig.model_validate(
        {
            "name": "squares",
            "folder": str(folder),
            "model": {"name": "vl", "rank": 4},
            "environments": [environment],
            "sampling": {"max_tokens": 4, "stop": []},
            "algorithm": {"type": "grpo"},
            "optimizer": {"learning_rate": 0.01},
            "steps": 2,
            "groups_per_step": 2,
            "group_size": 4,
        }
    )


def test_run_with_images_is_refused_before_its_first_rollout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The task squares/0 has images. The scripted policy takes no images"):
        run(squares(tmp_path / "run"))
    assert not list(tmp_path.glob("run/rollouts/*"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("served")
    model = save_vision_model(folder / "model", "qwen3_5")
    with embedded(ServeConfig(models=(f"vl={model}",), threads=1, dtype="float32", data=folder / "data")) as address:
        yield address


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_images_of_prompts_and_turns_are_trained(served: tuple[str, str], tmp_path: Path) -> None:
    """The second prompt extends the first one and its reply, with the tokens of one image more."""
    config = squares(tmp_path / "run", answer="")

    async def connect(state: str, version: int) -> TinkerTrainer:
        return await TinkerTrainer.connect(config.model, *served, seed=1, state=state, version=version)

    run(config, connect)
    steps = [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row]
    assert len(steps) == 2
    assert not any(row["rollouts/failed"] for row in steps)
    assert any(row["speed/trained_tokens_per_second"] for row in steps)
    for line in (tmp_path / "run" / "rollouts" / "train-000001.jsonl").read_text().splitlines():
        (trajectory,) = json.loads(line)["trajectories"]
        first, second = trajectory["turns"]
        assert (first["prompt"].count(IMAGE), second["prompt"].count(IMAGE)) == (4, 8)
        said = [*first["prompt"], *first["tokens"]]
        assert second["prompt"][: len(said)] == said
