"""`resume_from` with tinker:// paths of a served engine: the path alone is enough to continue a run exactly."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.rl.scripted_run import rows
from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.run.loop import train
from tinsmith.rl.run.state import METADATA_KEY, State, read_state
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

Address = tuple[str, str]


@pytest.fixture(scope="module")
def fake(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """Address and key of a service with the fake engine."""
    data = tmp_path_factory.mktemp("fake")
    with embedded(ServeConfig(models=(f"tiny={tiny_llama}",), engine="fake", data=data)) as address:
        yield address


@pytest.fixture(scope="module")
def torch_float32(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """Address and key of a service that computes the tiny Llama in float32."""
    config = ServeConfig(
        models=(f"tiny={tiny_llama}",), dtype="float32", device="cpu", threads=1, data=tmp_path_factory.mktemp("torch")
    )
    with embedded(config) as address:
        yield address


def settings(folder: Path, **changes: Any) -> RunConfig:
    """Six steps of the tiny model with a checkpoint after each."""
    values = {
        "model": {"name": "tiny", "rank": 4},
        "tasks": {"train": {"type": "addition"}, "held_out": 3},
        "rewards": [{"type": "format", "pattern": "(?s)[^<]*"}],  # about half of the replies of random weights
        "sampling": {"max_tokens": 6},
        "groups_per_step": 2,
        "group_size": 4,
        "steps": 6,
        "optimizer": {"learning_rate": 0.002},
        "checkpoint": {"every": 1},
        "concurrency": 1,
        "monitors": [],
        "name": "small",
        "folder": str(folder),
    }
    return RunConfig.model_validate({**values, **changes})


def run(address: Address, config: RunConfig) -> tuple[State, str]:
    """Train to the last step. Returns the final state and what the console shows."""

    async def connect(state: str, version: int) -> TinkerTrainer:
        return await TinkerTrainer.connect(config.model, *address, seed=config.seed, state=state, version=version)

    console = Console(file=io.StringIO(), soft_wrap=True)
    state = asyncio.run(train(config, connect, console))
    assert isinstance(console.file, io.StringIO)
    return state, console.file.getvalue()


def checkpoint(folder: Path, step: int) -> str:
    """tinker:// path of the checkpoint after `step`."""
    return json.loads((folder / "checkpoints" / f"step-{step:06}.json").read_text())["path"]


def logprobs(address: Address, path: str) -> np.ndarray:
    """Logprobs of some tokens by the weights at `path`."""

    async def main() -> np.ndarray:
        policy = await TinkerTrainer.connect(ModelConfig(name="tiny"), *address, seed=0, state=path)
        try:
            return await (await policy.snapshot()).logprobs(list(range(3, 40)))
        finally:
            await policy.models.close()

    return asyncio.run(main())


def rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    return list(map(json.loads, (folder / "rollouts" / f"train-{step:06}.jsonl").read_text().splitlines()))


@pytest.mark.parametrize("engine", ["fake", "torch_float32"])
def test_run_that_went_back_equals_an_uninterrupted_one(engine, request, tmp_path):
    """6 steps = 3 + 3 = 4, back to 3, then to 6 = the last 3 in a new folder, from the path alone; Adam included."""
    address: Address = request.getfixturevalue(engine)
    configured = partial(settings, group_size=8)  # in a smaller group, all replies may have one reward
    whole, resumed, reset, new = (tmp_path / name for name in ("whole", "resumed", "reset", "new"))
    run(address, configured(whole))
    run(address, configured(resumed, steps=3))
    run(address, configured(resumed))
    run(address, configured(reset, steps=4))
    _, shown = run(address, configured(reset, resume_from=checkpoint(reset, 3)))
    assert "resume_from: step 3, tinker://" in shown
    assert "exact, by its state file" in shown
    _, shown = run(address, configured(new, resume_from=checkpoint(whole, 3)))
    assert "exact, by the state that the server stores with it\n" in shown
    training = {row["step"]: row for row in rows(whole) if "optim/lr" in row}
    assert sum("optim/skipped" not in training[step] for step in (4, 5, 6)) >= 2
    expected = logprobs(address, read_path(whole))
    for folder, first in ((resumed, 1), (reset, 1), (new, 4)):
        assert [row for row in rows(folder) if "optim/lr" in row] == [training[step] for step in range(first, 7)]
        for step in range(first, 7):
            assert rollouts(folder, step) == rollouts(whole, step)
        np.testing.assert_array_equal(logprobs(address, read_path(folder)), expected)


def read_path(folder: Path) -> str:
    state = read_state(folder)
    assert state is not None
    assert state.step == 6
    return state.path


@pytest.fixture(scope="module")
def whole(fake: Address, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(fake, settings(folder))
    return folder


def save_as(address: Address, path: str, name: str, metadata: dict[str, str] | None = None) -> str:
    """Save the checkpoint at `path` again by another name, as another client may have."""

    async def main() -> str:
        policy = await TinkerTrainer.connect(ModelConfig(name="tiny"), *address, seed=0, state=path)
        try:
            return await policy.save(name, 3600, metadata)
        finally:
            await policy.models.close()

    return asyncio.run(main())


def test_state_is_derived_from_a_name_without_metadata(fake, whole, tmp_path):
    source = save_as(fake, checkpoint(whole, 3), "000003")
    _, shown = run(fake, settings(tmp_path, resume_from=source))
    assert "weights and optimizer are exact; its name gives step and version 3, and 6 tasks" in shown
    assert [row["step"] for row in rows(tmp_path) if "optim/lr" in row] == [4, 5, 6]
    for step in (4, 5, 6):  # nothing else of this run depends on its history
        assert rollouts(tmp_path, step) == rollouts(whole, step)


def test_metadata_without_long_parts_names_them(fake, whole, tmp_path):
    state = json.loads((whole / "checkpoints" / "step-000003.json").read_text())
    stored = {key: state[key] for key in ("step", "version", "order")}
    source = save_as(fake, checkpoint(whole, 3), "third", {METADATA_KEY: json.dumps(stored)})
    _, shown = run(fake, settings(tmp_path, resume_from=source))
    assert "but for batches sampled ahead, the position in the tasks, the states of global random generators" in shown
    assert rollouts(tmp_path, 4) == rollouts(whole, 4)


@pytest.mark.parametrize(
    ("source", "changes", "sentence"),
    [
        ("third", {"model": {"name": "tiny", "rank": 8}}, r"has rank 4; this run sets model\.rank=8"),
        (
            "third",
            {"model": {"name": "tiny", "rank": 4, "train_mlp": False}},
            r"train_mlp True; .*model\.train_mlp=False",
        ),
        ("third", {"steps": 2}, "is of step 3, and the run has 2 steps"),
        ("unknown", {}, "resume_from: .*nobody"),
        ("named", {}, "the server stores no state with .*best, and its name does not end in a step"),
        ("ppo", {"algorithm": {"type": "ppo"}}, "nothing says which checkpoint has the critic"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused(fake, whole, tmp_path, source, changes, sentence):
    path = {
        "third": lambda: checkpoint(whole, 3),
        "unknown": lambda: "tinker://nobody:train:0/weights/step-000001",
        "named": lambda: save_as(fake, checkpoint(whole, 3), "best"),
        "ppo": lambda: checkpoint(whole, 3),
    }[source]()
    with pytest.raises(ConfigError, match=sentence) as caught:
        run(fake, settings(tmp_path, resume_from=path, **changes))
    assert caught.value.hint
    assert not (tmp_path / "state.json").exists()
    assert not (tmp_path / "metrics.jsonl").exists()
