"""Unmodified tinker-cookbook recipes against `tinsmith serve --cluster`: two training and two sampling processes."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import RayCluster
from tests.end_to_end.conftest import KEY, SMOLLM2, install_cookbook, recipe_folder, run_recipe, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

Recipe = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a venv with the cookbook."""
    return install_cookbook(tmp_path_factory.mktemp("cookbook") / "venv")


@pytest.fixture(scope="module")
def workplace(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipe_folder(smollm2, tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="module")
def url(workplace: Path, ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of `tinsmith serve`; the processes of its base model run on both machines of the cluster."""
    options = ["--cluster", ray_cluster.address, "--trainers", "2", "--samplers", "2"]
    with serving(workplace, tmp_path_factory.mktemp("data"), [SMOLLM2], *options) as address:
        yield address


@pytest.fixture
def recipe(python: Path, workplace: Path, url: str, tmp_path: Path) -> Recipe:
    """A function that runs a recipe and returns the lines of its metrics."""

    def run(name: str, **settings: object) -> list[dict[str, Any]]:
        fixed = {"model_name": SMOLLM2, "renderer_name": "qwen3_instruct", "log_path": tmp_path / name}
        return run_recipe(python, workplace, url, name, {**fixed, **settings})

    return run


def test_cookbook_rl_on_arithmetic(recipe: Recipe, url: str) -> None:
    lines = recipe(
        "math_rl",
        **{"env": "arithmetic", "groups_per_batch": 4, "group_size": 4, "max_tokens": 6, "max_steps": 2},
        **{"lora_rank": 8, "loss_fn": "importance_sampling", "learning_rate": 1e-3},
    )
    steps = [line for line in lines if "env/all/reward/total" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["optim/kl_sample_train_v2"] < 1e-8  # samplers and trainers have the same weights
        assert step["tokens/sampled"] > 0
    processes = _processes(url)
    assert [(process["role"], process["is_up"]) for process in processes] == [
        *[("trainer", True)] * 2,
        *[("sampler", True)] * 2,
    ]
    assert len({process["machine"] for process in processes}) == 2


def test_cookbook_sft_on_chats(recipe: Recipe, python: Path) -> None:
    chats = next(python.parent.parent.rglob("tinker_cookbook/example_data/conversations.jsonl"))
    lines = recipe(
        "chat_sl",
        **{"dataset": chats, "batch_size": 16, "max_length": 256, "max_steps": 3, "save_every": 2},
        **{"lora_rank": 8, "learning_rate": 5e-4, "behavior_if_log_dir_exists": "raise"},
    )
    losses = [line["train_mean_nll"] for line in lines if "train_mean_nll" in line]
    assert len(losses) == 3
    assert losses[2] < 0.9 * losses[0]


def _processes(url: str) -> list[dict[str, Any]]:
    request = urllib.request.Request(f"{url}/api/v1/admin/processes", headers={"X-API-Key": KEY})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["base_models"][0]["processes"]
