"""A step that would overflow is refused and leaves the model unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.data import pass_for
from tests.engine.sampling.helpers import sample_request
from tinsmith.engine.base import AdamParams, LoraSpec
from tinsmith.engine.training.optimizer import MAX_WEIGHT, UpdateBound
from tinsmith.engine.validation import check_adam
from tinsmith.errors import BadRequest, UserError

GOOD = AdamParams(learning_rate=0.01, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)
ZERO = "an eps of 0, where A's gradient is 0"
OVERFLOWING = {
    ZERO: (AdamParams(eps=0.0), "eps 0"),
    "a rate beyond float32": (AdamParams(learning_rate=1e39, eps=1e-8), "learning_rate 1e+39"),
    "a rate near its end, clipped": (
        AdamParams(learning_rate=3e38, eps=1e-8, grad_clip_norm=0.1),
        "learning_rate 3e+38",
    ),
    "decay beyond it": (AdamParams(learning_rate=1e20, weight_decay=1e30, eps=1e-8), "weight_decay 1e+30"),
}


def state(engine: Any, wait: Any, model_id: str, folder: Path) -> dict[str, Tensor]:
    """Weights, moments and gradient of a model."""
    wait(engine.save(model_id, folder, optimizer=True))
    tensors = load_file(folder / "adapter_model.safetensors") | load_file(folder / "optimizer.safetensors")
    for name, pair in engine.trainer.gradients(model_id).items():
        tensors |= {f"{name}.a": torch.tensor(pair[0]), f"{name}.b": torch.tensor(pair[1])}
    return tensors


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("case", "stepped"),
    [(case, stepped) for case in OVERFLOWING for stepped in (False, True) if case != ZERO or not stepped],
)
def test_overflowing_step_is_refused_and_reverted(
    engine_of: Any, wait: Any, tmp_path: Path, model_id: str, case: str, stepped: bool
) -> None:
    engine, (adam, says) = engine_of("llama", dtype="bfloat16" if stepped else "float32"), OVERFLOWING[case]
    twin = f"{model_id}-twin"
    for name in (model_id, twin):
        wait(engine.create(name, LoraSpec(rank=4, seed=1)))
        if stepped:
            wait(engine.run([pass_for("cross_entropy", name, seed=3)]))
            wait(engine.step(name, GOOD))
            wait(engine.capture(name, f"{name}-version"))
        wait(engine.run([pass_for("cross_entropy", name)]))
    before = state(engine, wait, model_id, tmp_path / "before")
    with pytest.raises(BadRequest, match=says.replace("+", r"\+")):
        wait(engine.step(model_id, adam))
    assert same(before, state(engine, wait, model_id, tmp_path / "after"))
    assert wait(engine.step(model_id, GOOD)) == wait(engine.step(twin, GOOD))
    assert same(*(state(engine, wait, name, tmp_path / name) for name in (model_id, twin)))
    for name in (model_id, twin):
        wait(engine.detach(f"{name}-version"))
        wait(engine.drop(name))


def test_extreme_rate_without_overflow_is_accepted(engine: Any, wait: Any, model_id: str) -> None:
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    wait(engine.run([pass_for("cross_entropy", model_id)]))
    wait(engine.step(model_id, AdamParams(learning_rate=1e30, eps=1e-8)))
    assert float(engine.trainer._models[model_id].master.detach().abs().max()) == pytest.approx(1e30, rel=0.2)
    wait(engine.drop(model_id))


def test_huge_gradient_is_refused_until_a_state_is_loaded(
    engine: Any, wait: Any, tmp_path: Path, model_id: str
) -> None:
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    wait(engine.save(model_id, tmp_path / "saved", optimizer=True))
    wait(engine.run([pass_for("cross_entropy", model_id)]))
    engine.trainer._models[model_id].gradient.mul_(1e19)
    for _ in range(2):
        with pytest.raises(BadRequest, match="gradient's norm"):
            wait(engine.step(model_id, GOOD))
    wait(engine.load(model_id, tmp_path / "saved", optimizer=True))
    wait(engine.run([pass_for("cross_entropy", model_id)]))
    wait(engine.step(model_id, GOOD))
    wait(engine.drop(model_id))


@pytest.mark.parametrize("eps", [0.0, 1e-60, 1e-46])
def test_eps_of_zero_in_float32_is_refused_at_submission(eps: float) -> None:
    with pytest.raises(BadRequest, match=r"adam_params\.eps"):
        check_adam(AdamParams(eps=eps))
    check_adam(AdamParams(eps=1e-37))


@pytest.mark.parametrize("file", ["adapter_model", "optimizer"])
def test_saved_state_with_nan_is_refused(engine: Any, wait: Any, tmp_path: Path, model_id: str, file: str) -> None:
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    wait(engine.run([pass_for("cross_entropy", model_id)]))
    wait(engine.step(model_id, GOOD))
    before = state(engine, wait, model_id, tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / f"{file}.safetensors")
    next(tensor for tensor in tensors.values() if tensor.ndim).view(-1)[5] = float("nan")
    save_file(tensors, tmp_path / "saved" / f"{file}.safetensors")
    with pytest.raises(UserError, match="not finite"):
        wait(engine.load(model_id, tmp_path / "saved", optimizer=True))
    assert same(before, state(engine, wait, model_id, tmp_path / "after"))
    if file == "adapter_model":
        wait(engine.attach("broken", tmp_path / "saved"))
        with pytest.raises(UserError, match="not finite"):
            wait(engine.sample(sample_request(version="broken")))
        wait(engine.detach("broken"))
    wait(engine.drop(model_id))


def test_ordinary_training_is_far_from_the_bound() -> None:
    """No ordinary step needs the check: the SDK's eps, a large loss, a million steps."""
    bound = UpdateBound(weights=1.0)
    for steps in range(1, 1000):
        bound = bound.after(AdamParams(learning_rate=1e-2), norm=1e6, steps=steps)
    assert bound.weights * 1000 < MAX_WEIGHT / 1e6
