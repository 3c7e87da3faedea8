"""Every algorithm preset trains two steps through the SDK, the service and the torch engine, and some variants too."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from rich.console import Console

from tests.rl.algorithms.helpers import run
from tests.rl.scripted_run import rows
from tinsmith.rl.algorithms.config import DATA_ONLY, NAMES, PAIRS, AlgorithmConfig
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.policy.tinker_models import TinkerModels
from tinsmith.rl.policy.trainer import Trainer
from tinsmith.rl.run.loop import train
from tinsmith.rl.types import Rollout, Task
from tinsmith.rl.workflows.conversation import Conversation
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

HERE = {*PAIRS, "topr", "sapo", "sppo", "rec", "mix", "mix_chord", "topk_distill"}
"""Algorithms whose loss is always computed by the client."""

ServerLoss = tuple[tuple[str, str], Path]


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerLoss]:
    """Address of a service with two models, and a file of demonstrations."""
    folder = tmp_path_factory.mktemp("presets")
    data = [{"question": f"{n}?", "answer": str(n), "worse": "no", "text": f"{n} is {n}"} for n in range(9)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    models = (f"tiny={tiny('llama')}", f"teacher={tiny('untied')}")
    with embedded(ServeConfig(models=models, threads=1, dtype="float32", data=folder / "served")) as address:
        yield address, folder / "data.jsonl"


def vowel_reward(task: Task, rollout: Rollout) -> float:
    """A reward that differs among replies of random weights."""
    return sum(letter in "aeiou" for letter in rollout.text) / 4


async def stateful_workflow(task: Task, conversation: Conversation) -> None:
    """A workflow that reports the state of each turn, which gigpo compares."""
    await conversation.say(*task.messages, state=task.id)


def settings(name: str, data: Path, folder: Path) -> RunConfig:
    """A run of two steps with the algorithm `name`."""
    algorithm: dict[str, Any] = {"type": name}
    if name in ("jsd", "on_policy_distill", "topk_distill"):
        algorithm["teacher"] = "teacher"
    data_source: dict[str, Any] = {"type": "jsonl", "path": str(data)}
    if name in PAIRS:
        data_source |= {"chosen": "{answer}", "rejected": "{worse}"}
    if name == "cpt":
        data_source |= {"prompt": "{text}"}
    demonstrations = {"demonstrations": {"data": data_source, **({"learn": "text"} if name == "cpt" else {})}}
    values = {
        "model": {"name": "tiny", "rank": 4},
        "algorithm": algorithm,
        "tasks": {"train": {"type": "addition"}, "held_out": 0},
        "rewards": [{"type": "custom", "path": f"{__name__}:vowel_reward"}],
        "sampling": {"max_tokens": 6},
        "groups_per_step": 3,
        **({} if name in DATA_ONLY else {"group_size": 4}),
        "steps": 2,
        "optimizer": {"learning_rate": 1e-2},
        "monitors": [],
        "name": name,
        "folder": str(folder),
        **({"workflow": {"type": "custom", "path": f"{__name__}:stateful_workflow"}} if name == "gigpo" else {}),
        **(demonstrations if name in (*DATA_ONLY, "mix", "mix_chord") else {}),
    }
    return RunConfig.model_validate(values)


def trained(config: RunConfig, address: tuple[str, str]) -> tuple[str, float]:
    """The console output of a run, and the largest change of a logprob."""

    async def connect(state: str, version: int) -> Trainer:
        return await TinkerTrainer.connect(config.model, *address, seed=1, state=state, version=version)

    async def work() -> tuple[str, float]:
        said = io.StringIO()
        state = await train(config, connect, Console(file=said, width=200))
        peers = await TinkerModels.connect(config.model, *address)
        base, after = [
            await (await peers.open_model(name)).logprobs(range(50)) for name in ("tiny", state.sampling_path)
        ]
        await peers.close()
        return said.getvalue(), float(np.abs(base - after).max())

    return run(work())


@pytest.mark.parametrize("name", NAMES)
def test_preset_learns_with_the_loss_that_it_reports(name, served: ServerLoss, tmp_path, monkeypatch):
    address, data = served
    losses: list[str] = []

    def recorded(method: Any, label: str | None) -> Any:
        def call(self: tinker.TrainingClient, rows: Any, loss: Any, *rest: Any) -> Any:
            losses.append(label or loss)
            return method(self, rows, loss, *rest)

        return call

    for method, label in (("forward_backward", None), ("forward_backward_custom", "computed here")):
        monkeypatch.setattr(tinker.TrainingClient, method, recorded(getattr(tinker.TrainingClient, method), label))
    said, moved = trained(settings(name, data, tmp_path), address)

    where = "computed here" if name in HERE else losses[-1]
    assert f"{where}, which costs" in said if name in HERE else f"the server's {where}\n" in said
    assert losses.count(where) >= 2
    assert moved > 1e-3
    steps = [row for row in rows(tmp_path) if row["step"] > 0]
    assert [row["step"] for row in steps if "optim/rows" in row] == [1, 2]
    assert all(math.isfinite(value) for row in steps for value in row.values())


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tis": ({"type": "grpo", "correction": {"type": "tis"}}, {}, "cispo"),
    "tis of rows": ({"type": "rloo", "correction": {"type": "tis", "level": "sequence"}}, {}, ""),
    "mis": ({"type": "grpo", "correction": {"type": "mis", "floor": 0.5}}, {}, ""),
    "tempered": ({"type": "grpo"}, {"temperature": 0.7}, "importance_sampling"),
    "recomputed": ({"type": "rloo"}, {"temperature": 0.7, "top_p": 0.9}, "ppo"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_learns_without_mismatch(name: str, served: ServerLoss, tmp_path: Path, monkeypatch):
    algorithm, sampling, server_loss = VARIANTS[name]
    address, data = served
    losses: list[str] = []
    submit = tinker.TrainingClient.forward_backward

    def recorded(self: tinker.TrainingClient, batch: Any, loss: Any, *rest: Any) -> Any:
        losses.append(loss)
        return submit(self, batch, loss, *rest)

    monkeypatch.setattr(tinker.TrainingClient, "forward_backward", recorded)
    changes = {
        "algorithm": AlgorithmConfig.model_validate(algorithm),
        "sampling": SamplingConfig(max_tokens=6, **sampling),
    }
    said, moved = trained(settings("grpo", data, tmp_path).model_copy(update=changes), address)
    assert moved > 1e-3
    assert set(losses) == ({server_loss} if server_loss else set())
    assert ("computed here" in said) == (not server_loss)
    steps = [row for row in rows(tmp_path) if "optim/rows" in row]
    assert len(steps) == 2
    for row in steps:
        assert all(math.isfinite(value) for value in row.values())
        mismatch = row["optim/kl_sample_train_v2"]
        assert mismatch < 1e-6 if name != "tempered" else mismatch > 1e-6
        if not server_loss:
            assert row["optim/correction/weight"] == pytest.approx(1.0, abs=1e-2)
            assert row["optim/correction/bounded"] == 0.0
