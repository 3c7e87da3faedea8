"""Unmodified cookbook recipes that name large models, against tiny models of the same architecture under these names.

The recipes choose their renderers by the name. Each tiny model has a stand-in tokenizer: any text, and the special
tokens of the model's renderer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architectures import save_tiny
from tests.end_to_end.conftest import run_recipe, serving
from tests.models import save_tokenizer

pytestmark = pytest.mark.slow

THINKING = ("<think>", "</think>")
NAMES = {
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", THINKING),
    "Qwen/Qwen3.5-4B": ("qwen3_5_text", THINKING),
    "Qwen/Qwen3.6-35B-A3B": ("qwen3_5_moe_text", THINKING),
    "openai/gpt-oss-20b": (
        "gpt_oss",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    ),
    "deepseek-ai/DeepSeek-V3.1": (
        "deepseek_v3",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", *THINKING),
    ),
}
CONTEXT = 4096
# Not the recipe's own loss, whose objective is not published.
RL = {
    "env": "arithmetic",
    "loss_fn": "importance_sampling",
    "groups_per_batch": 2,
    "group_size": 2,
    "max_tokens": 6,
    "max_steps": 2,
    "lora_rank": 4,
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that recipes and server run in; the names of the models are paths in it."""
    folder = tmp_path_factory.mktemp("names")
    for name, (model_type, special) in NAMES.items():
        tokenizer = save_tokenizer(folder / name)
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        save_tiny(model_type, folder / name, vocab_size=len(tokenizer), max_position_embeddings=CONTEXT)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def url(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of one server of all models."""
    with serving(workplace, tmp_path_factory.mktemp("data"), list(NAMES)) as address:
        yield address


@pytest.mark.parametrize("name", NAMES)
def test_cookbook_rl(name: str, python: Path, workplace: Path, url: str, tmp_path: Path) -> None:
    settings = {"model_name": name, "log_path": tmp_path / "rl", "learning_rate": 1e-3, **RL}
    lines = run_recipe(python, workplace, url, "math_rl", settings)
    steps = [line for line in lines if "env/all/reward/total" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["optim/kl_sample_train_v2"] < 1e-7
        assert step["tokens/sampled"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_cookbook_sft(name: str, python: Path, workplace: Path, url: str, tmp_path: Path) -> None:
    chats = next(python.parent.parent.rglob("tinker_cookbook/example_data/conversations.jsonl"))
    settings = {"model_name": name, "log_path": tmp_path / "sl", "dataset": chats, "batch_size": 8, "max_length": 256}
    lines = run_recipe(
        python, workplace, url, "chat_sl", {**settings, "lora_rank": 4, "learning_rate": 1e-2, "max_steps": 3}
    )
    losses = [line["train_mean_nll"] for line in lines if "train_mean_nll" in line]
    assert len(losses) == 3
    assert losses[2] < losses[0]
