"""Adapters on disk: PEFT reads them, training resumes exactly, and a bad folder changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file, save_file

from tests.engine.data import pass_for
from tests.engine.inspection import gradients_of, weights_of
from tests.engine.reference import assert_same, plain_model, tied_embeddings_are_meant, write_adapter
from tests.engine.training.test_trainer import FLAGS, spec
from tests.models import KINDS
from tinsmith.engine.base import AdamParams, LoraSpec
from tinsmith.errors import TinsmithError

ADAM = AdamParams(learning_rate=5e-3, eps=1e-8)


def train(engine: Any, model_id: str, wait: Any, *seeds: int) -> None:
    for seed in seeds:
        wait(engine.run([pass_for("cross_entropy", model_id, seed=seed)]))
        wait(engine.step(model_id, ADAM))


def logprobs(engine: Any, model_id: str, wait: Any) -> np.ndarray:
    (result,) = wait(engine.run([pass_for("cross_entropy", model_id, seed=99, forward_only=True)]))
    return np.concatenate(result.logprobs)


def peft_logprobs(base: Path, adapter: Path) -> np.ndarray:
    """Logprobs by plain transformers and PEFT, one row at a time."""
    with tied_embeddings_are_meant():
        model = PeftModel.from_pretrained(plain_model(base), adapter)
    rows = []
    for datum in pass_for("cross_entropy", seed=99).data:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0]
        rows.append(logits.log_softmax(-1).gather(-1, torch.from_numpy(datum.targets)[:, None])[:, 0].numpy())
    return np.concatenate(rows)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_peft_loads_saved_adapter(flags: Any, engine: Any, tiny_llama: Path, wait: Any, model_id: str, tmp_path: Path):
    wait(engine.create(model_id, spec(flags, rank=5)))
    train(engine, model_id, wait, 1, 2)
    size = wait(engine.save(model_id, tmp_path / "saved", optimizer=False))
    assert size == sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())
    expected, trained = peft_logprobs(tiny_llama, tmp_path / "saved"), logprobs(engine, model_id, wait)
    np.testing.assert_allclose(trained, expected, atol=1e-5)
    wait(engine.drop(model_id))


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_saved_adapter_of_every_base_model(
    kind: str, engine_of: Any, tiny: Any, wait: Any, model_id: str, tmp_path: Path
):
    engine = engine_of(kind)
    wait(engine.create(model_id, LoraSpec(rank=5, seed=2)))
    before = logprobs(engine, model_id, wait)
    train(engine, model_id, wait, 1, 2)
    wait(engine.save(model_id, tmp_path / "saved", optimizer=True))
    after = logprobs(engine, model_id, wait)
    assert np.abs(after - before).max() > 0.05
    np.testing.assert_allclose(after, peft_logprobs(tiny(kind), tmp_path / "saved"), atol=1e-5)


def test_adapter_config_has_fields_of_peft(engine: Any, wait: Any, model_id: str, tmp_path: Path):
    wait(engine.create(model_id, LoraSpec(rank=5, seed=2)))
    wait(engine.save(model_id, tmp_path / "saved", optimizer=False))
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"]) == (5, 32)
    assert "lm_head" in config["target_modules"]


def test_training_resumes_exactly_with_optimizer(engine: Any, wait: Any, model_id: str, tmp_path: Path):
    resumed = f"{model_id}-resumed"
    wait(engine.create(model_id, LoraSpec(rank=4, seed=2)))
    train(engine, model_id, wait, 1, 2)
    wait(engine.save(model_id, tmp_path / "saved", optimizer=True))
    wait(engine.load(resumed, tmp_path / "saved", optimizer=True))
    for name in (model_id, resumed):
        train(engine, name, wait, 3, 4)
    continued, reloaded = (weights_of(engine, name, wait, tmp_path / name) for name in (model_id, resumed))
    assert_same(reloaded, continued, tolerance=0)


def test_moments_start_at_zero_without_optimizer(engine: Any, wait: Any, model_id: str, tmp_path: Path):
    wait(engine.create(model_id, LoraSpec(rank=4, seed=2)))
    train(engine, model_id, wait, 1, 2)
    wait(engine.save(model_id, tmp_path / "full", optimizer=True))
    wait(engine.save(model_id, tmp_path / "bare", optimizer=False))
    starts = (("a", "full", False), ("b", "bare", False), ("c", "full", True))
    for name, folder, optimizer in starts:
        wait(engine.load(name, tmp_path / folder, optimizer=optimizer))
        train(engine, name, wait, 3)
    a, b, c = (weights_of(engine, name, wait, tmp_path / name) for name in "abc")
    for name in "abc":
        wait(engine.drop(name))
    assert_same(a, b, tolerance=0)
    assert any(not np.allclose(a[name], c[name]) for name in a)


def test_load_fails_for_missing_moments(engine: Any, wait: Any, model_id: str, tmp_path: Path):
    wait(engine.create(model_id, LoraSpec(rank=4, seed=2)))
    wait(engine.save(model_id, tmp_path / "bare", optimizer=False))
    with pytest.raises(TinsmithError):
        wait(engine.load(f"{model_id}-other", tmp_path / "bare", optimizer=True))


def test_load_replaces_model(engine: Any, wait: Any, model_id: str, tmp_path: Path, adapter_of: Any):
    wait(engine.create(model_id, LoraSpec(rank=9, seed=2, train_mlp=False)))
    wait(engine.run([pass_for("cross_entropy", model_id)]))
    wait(engine.load(model_id, adapter_of(), optimizer=False))
    assert all((gradient == 0).all() for gradient in gradients_of(engine, model_id).values())
    assert_same(weights_of(engine, model_id, wait, tmp_path), load_file(adapter_of() / "adapter_model.safetensors"), 0)


def broken(source: Path, fault: str, folder: Path) -> Path:
    """A damaged copy of an adapter."""
    shutil.copytree(source, folder)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, settings = load_file(weights), json.loads(config.read_text())
    last = sorted(tensors)[-1]
    if fault == "no weights":
        weights.unlink()
    elif fault == "no config":
        config.unlink()
    elif fault == "half a file":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif fault == "a tensor is missing":
        save_file({name: tensor for name, tensor in tensors.items() if name != last}, weights)
    elif fault == "a tensor of another shape":
        save_file({**tensors, last: tensors[last][:-1].copy()}, weights)
    elif fault == "a tensor too many":
        save_file({**tensors, "base_model.model.model.layers.77.mlp.up_proj.lora_A.weight": tensors[last]}, weights)
    elif fault == "a NaN":
        save_file({**tensors, last: np.full_like(tensors[last], np.nan)}, weights)
    elif fault == "not lora":
        config.write_text(json.dumps({**settings, "peft_type": "IA3"}))
    elif fault == "dora":
        config.write_text(json.dumps({**settings, "use_dora": True}))
    return folder


@pytest.mark.parametrize(
    "fault",
    [
        "no weights",
        "no config",
        "half a file",
        "a tensor is missing",
        "a tensor of another shape",
        "a tensor too many",
        "a NaN",
        "not lora",
        "dora",
    ],
)
def test_broken_folder_leaves_model_unchanged(
    fault: str, engine: Any, wait: Any, model_id: str, tmp_path: Path, adapter_of: Any
):
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    train(engine, model_id, wait, 1)
    wait(engine.run([pass_for("cross_entropy", model_id, seed=2)]))
    before, gradients = weights_of(engine, model_id, wait, tmp_path / "before"), gradients_of(engine, model_id)
    with pytest.raises(TinsmithError):
        wait(engine.load(model_id, broken(adapter_of(), fault, tmp_path / "broken"), optimizer=False))
    assert_same(weights_of(engine, model_id, wait, tmp_path / "after"), before, tolerance=0)
    assert_same(gradients_of(engine, model_id), gradients, tolerance=0)
    with pytest.raises(TinsmithError):
        wait(engine.load(f"{model_id}-new", tmp_path / "broken", optimizer=False))
    with pytest.raises(TinsmithError):  # and the partial model is gone
        wait(engine.step(f"{model_id}-new", ADAM))


def test_adapter_of_other_base_model_is_refused(engine_of: Any, engine: Any, wait: Any, model_id: str, tmp_path: Path):
    wait(engine_of("qwen3").create(model_id, LoraSpec(rank=4, seed=1)))
    wait(engine_of("qwen3").save(model_id, tmp_path / "saved", optimizer=False))
    with pytest.raises(TinsmithError):
        wait(engine.load(model_id, tmp_path / "saved", optimizer=False))


def test_failed_save_leaves_no_files(engine: Any, wait: Any, model_id: str, tmp_path: Path):
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    (tmp_path / "file").write_text("a file where a folder should be")
    with pytest.raises((TinsmithError, OSError)):
        wait(engine.save(model_id, tmp_path / "file" / "saved", optimizer=True))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    wait(engine.save(model_id, tmp_path / "deep" / "er" / "saved", optimizer=True))
    assert {entry.name for entry in (tmp_path / "deep" / "er").iterdir()} == {"saved"}


def test_save_and_load_are_exact(engine: Any, wait: Any, model_id: str, tmp_path: Path):
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    train(engine, model_id, wait, 1, 2)
    wait(engine.save(model_id, tmp_path / "saved", optimizer=True))
    wait(engine.load(f"{model_id}-again", tmp_path / "saved", optimizer=True))
    np.testing.assert_array_equal(logprobs(engine, model_id, wait), logprobs(engine, f"{model_id}-again", wait))
    wait(engine.drop(f"{model_id}-again"))


def test_drop_twice_is_ignored(engine: Any, wait: Any, model_id: str):
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    wait(engine.drop(model_id))
    wait(engine.drop(model_id))
    with pytest.raises(TinsmithError):
        wait(engine.step(model_id, ADAM))


def test_adapter_written_by_peft_is_loaded(engine: Any, tiny_llama: Path, wait: Any, model_id: str, tmp_path: Path):
    folder = write_adapter(tiny_llama, tmp_path / "peft", LoraSpec(rank=6, seed=3, train_mlp=False))
    wait(engine.load(model_id, folder, optimizer=False))
    np.testing.assert_allclose(logprobs(engine, model_id, wait), peft_logprobs(tiny_llama, folder), atol=1e-5)
