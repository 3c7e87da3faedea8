"""Unmodified tinker-cookbook recipes against `tinsmith serve`: RL on arithmetic, fine-tuning on the bundled chats."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.conftest import SMOLLM2, recipe_folder, run_recipe, serving
from tests.service.conftest import datum
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.slow

Recipe = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def workplace(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipe_folder(smollm2, tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="module")
def url(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of `tinsmith serve`."""
    with serving(workplace, tmp_path_factory.mktemp("data"), [SMOLLM2]) as address:
        yield address


@pytest.fixture
def recipe(python: Path, workplace: Path, url: str, tmp_path: Path) -> Recipe:
    """A function that runs a recipe and returns the lines of its metrics."""

    def run(name: str, folder: str, **settings: object) -> list[dict[str, Any]]:
        fixed = {"model_name": SMOLLM2, "renderer_name": "qwen3_instruct", "log_path": tmp_path / folder}
        return run_recipe(python, workplace, url, name, {**fixed, **settings})

    return run


RL = {"env": "arithmetic", "groups_per_batch": 4, "group_size": 4, "max_tokens": 6, "max_steps": 2, "lora_rank": 8}


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_cookbook_rl_on_arithmetic(loss_fn: str, recipe: Recipe) -> None:
    lines = recipe("math_rl", "rl", loss_fn=loss_fn, learning_rate=1e-3, **RL)
    steps = [line for line in lines if "env/all/reward/total" in line]
    assert len(steps) == 2
    for step in steps:
        # Difference of trainer and sampler logprobs; dense models are below 1e-2, float32 far below.
        assert step["optim/kl_sample_train_v2"] < 1e-8
        assert step["tokens/sampled"] > 0


def test_unpublished_loss_is_rejected_with_a_hint(recipe: Recipe) -> None:
    with pytest.raises(AssertionError, match="loss_fn=importance_sampling"):
        recipe("math_rl", "refused", loss_fn="stable_reinforce", **RL)


def test_cookbook_sft_resumes_from_a_checkpoint(recipe: Recipe, python: Path, tmp_path: Path) -> None:
    chats = next(python.parent.parent.rglob("tinker_cookbook/example_data/conversations.jsonl"))
    settings = {"dataset": chats, "batch_size": 16, "max_length": 256, "lora_rank": 8, "learning_rate": 5e-4}
    first = recipe("chat_sl", "sl", max_steps=2, save_every=1, behavior_if_log_dir_exists="raise", **settings)
    # As left by a killed run; a finished run would not resume.
    saved = (tmp_path / "sl" / "checkpoints.jsonl").read_text().splitlines()
    (tmp_path / "sl" / "checkpoints.jsonl").write_text("".join(f"{line}\n" for line in saved if "final" not in line))
    again = recipe("chat_sl", "sl", max_steps=4, save_every=1, behavior_if_log_dir_exists="resume", **settings)
    losses = [line["train_mean_nll"] for line in again if "train_mean_nll" in line]
    assert [line["step"] for line in again if "train_mean_nll" in line] == [0, 1, 2, 3]
    # The cookbook resumes with the batch of the saved step, so its loss is lower than the first time.
    assert losses[1] < next(line["train_mean_nll"] for line in first if line["step"] == 1) < 0.9 * losses[0]
    assert losses[3] < 0.7 * losses[0]


def test_weights_are_downloaded_decrypted_and_merged(python: Path, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """The cookbook downloads encrypted files, decrypts them, and merges them into an equivalent model."""
    base, tokens = tiny("untied"), [5, 6, 7, 8, 9, 10]
    script = "import sys; from tinker_cookbook import weights as w; path, base, out, merged = sys.argv[1:]"
    script += "; w.download(tinker_path=path, output_dir=out); w.build_hf_model(base_model=base, adapter_path=out, "
    script += "output_path=merged, dtype='float32')"
    config = ServeConfig(models=(str(base),), data=tmp_path / "data", device="cpu", dtype="float32", threads=1)
    with embedded(config) as (address, key):
        client = tinker.ServiceClient(base_url=address, api_key=key)
        train = client.create_lora_training_client(str(base), rank=4, seed=1).result()
        data = [datum(tokens, weights=[1.0] * 5)]
        train.forward_backward(data, "cross_entropy").result()
        train.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
        ours = train.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        path = train.save_state("final").result().path
        words = [path, base, tmp_path / "adapter", tmp_path / "merged"]
        places = {"TINKER_BASE_URL": address, "TINKER_API_KEY": key, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [python, "-c", script, *words], env={**os.environ, **places}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-4000:]
        [left] = tinker.RestClient(base_url=address, api_key=key).list_user_checkpoints().result().checkpoints
        assert left.tinker_path == path
        client.close("success").result()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        logprobs = merged(torch.tensor([tokens[:-1]])).logits.log_softmax(-1)
    np.testing.assert_allclose(logprobs[0, range(5), tokens[1:]].numpy(), ours, atol=1e-3)
