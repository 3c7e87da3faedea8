"""A new adapter: initialization from seed and flags, without effect before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.engine.data import pass_for
from tests.engine.reference import plain_model, target_modules
from tests.models import KINDS
from tinsmith.engine.base import AdamParams, LoraSpec


@pytest.fixture
def fresh(engine_of: Callable[..., Any], wait: Any, tmp_path: Path, model_id: str) -> Any:
    """Tensors of a new adapter, by the names of PEFT's adapter file."""
    made = []

    def tensors(lora: LoraSpec, kind: str = "llama") -> dict[str, np.ndarray]:
        name, engine = f"{model_id}-{len(made)}", engine_of(kind)
        made.append((engine, name))
        wait(engine.create(name, lora))
        wait(engine.save(name, tmp_path / name, optimizer=False))
        return load_file(tmp_path / name / "adapter_model.safetensors")

    yield tensors
    for engine, name in made:
        wait(engine.drop(name))


def test_seed_determines_the_adapter(fresh: Any):
    first, again, other = (fresh(LoraSpec(rank=4, seed=seed)) for seed in (11, 11, 12))
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, again[name])
        assert "lora_B" in name or not np.array_equal(tensor, other[name])


def test_layers_start_with_different_weights(fresh: Any):
    starts = [tensor for name, tensor in fresh(LoraSpec(rank=4, seed=1)).items() if "lora_A" in name]
    for index, left in enumerate(starts):
        for right in starts[index + 1 :]:
            width = min(left.shape[1], right.shape[1])
            assert not np.allclose(left[:, :width], right[:, :width])


def test_a_is_kaiming_uniform_and_b_is_zero(fresh: Any):
    for name, tensor in fresh(LoraSpec(rank=64, seed=5)).items():
        assert tensor.dtype == np.float32
        if "lora_B" in name:
            assert (tensor == 0).all()
            continue
        bound = 1 / np.sqrt(tensor.shape[1])
        assert np.abs(tensor).max() <= bound
        assert np.abs(tensor).max() > 0.98 * bound
        assert tensor.std() == pytest.approx(bound / np.sqrt(3), rel=0.05)


@pytest.mark.parametrize(
    "flags", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_flags_choose_the_modules(kind: str, flags: tuple[bool, bool, bool], fresh: Any, tiny: Any):
    lora = LoraSpec(rank=3, seed=0, train_attn=flags[0], train_mlp=flags[1], train_unembed=flags[2])
    wanted = {}
    for name, module in plain_model(tiny(kind), torch.float32).named_modules():
        if name.rsplit(".", 1)[-1] in target_modules(lora):
            wanted[f"base_model.model.{name}.lora_A.weight"] = (3, module.in_features)
            wanted[f"base_model.model.{name}.lora_B.weight"] = (module.out_features, 3)
    assert {name: tensor.shape for name, tensor in fresh(lora, kind).items()} == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_new_adapter_gives_base_model_logprobs(kind: str, engine_of: Any, tiny: Any, wait: Any, model_id: str):
    engine, request = engine_of(kind), pass_for("cross_entropy", model_id, forward_only=True)
    wait(engine.create(model_id, LoraSpec(rank=8, seed=3)))
    (result,) = wait(engine.run([request]))
    base = plain_model(tiny(kind))
    for datum, actual in zip(request.data, result.logprobs, strict=True):
        with torch.no_grad():
            logits = base(input_ids=torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0]
        wanted = logits.log_softmax(-1).gather(-1, torch.from_numpy(datum.targets)[:, None])[:, 0]
        np.testing.assert_allclose(actual, wanted.numpy(), atol=1e-5)


def test_first_step_changes_only_b(engine: Any, wait: Any, model_id: str, tmp_path: Path):
    wait(engine.create(model_id, LoraSpec(rank=4, seed=3)))
    saved = []
    for folder in (tmp_path / "before", tmp_path / "after"):
        wait(engine.save(model_id, folder, optimizer=False))
        saved.append(load_file(folder / "adapter_model.safetensors"))
        wait(engine.run([pass_for("cross_entropy", model_id)]))
        wait(engine.step(model_id, AdamParams(learning_rate=1e-2)))
    for name, tensor in saved[0].items():
        assert np.array_equal(tensor, saved[1][name]) == ("lora_A" in name), name
