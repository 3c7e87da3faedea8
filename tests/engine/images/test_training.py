"""Training on images against transformers with PEFT: logprobs and gradients of rows with and without images."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tests.engine.conftest import Wait
from tests.engine.images.conftest import Parts, row_of
from tests.engine.lora.merged import merged_weights
from tests.engine.reference import assert_same
from tests.vision import END, START, picture, plain_inputs, vision_model
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass
from tinsmith.engine.exchange.forms import facts_of_config
from tinsmith.engine.lora.adapter import LoraPair
from tinsmith.engine.validation import check_pass
from tinsmith.errors import BadRequest, TinsmithError

A, B = picture(0), picture(1, 64, 48)
ROWS: tuple[Parts, ...] = (
    [[5, 6, START], A, [END, 8, 9]],
    [[5, 6, START], B, [END, 8, 9, 4, START], A, [END, 3]],
    [[5, 6, START], B, [END, 8, 11]],
    [[5, 6, 7, 8, 9]],
)
"""With text before and after, two images, the beginning of another row, and no image."""


def datum_of(parts: Parts, *, seed: int = 0) -> Datum:
    """The row's own tokens as targets, with random weights where the next token is text."""
    tokens, images = row_of(parts)
    targets = np.append(tokens[1:], 7).astype(np.int64)
    weights = np.random.default_rng(seed).uniform(0.2, 1.0, len(tokens)).astype(np.float32)
    weights[targets < 0], targets[targets < 0] = 0.0, 0
    return Datum(tokens=tokens, targets=targets, inputs={"weights": weights}, images=images)


def pass_of(model_id: str, rows: Sequence[Parts] = ROWS, **fields: Any) -> Pass:
    data = tuple(datum_of(row, seed=number) for number, row in enumerate(rows))
    return Pass(**({"model_id": model_id, "data": data, "loss_fn": "cross_entropy"} | fields))


def run(engine: Any, wait: Wait, request: Pass) -> Any:
    [result] = wait(engine.run([request]))
    if isinstance(result, TinsmithError):
        raise result
    return result


@pytest.fixture(scope="module")
def train(vision_engine: Callable[..., Any], wait: Wait, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains an adapter on a model of a type, so that its B is not zero; returns engine, name and the saved adapter."""
    made: dict[Any, Any] = {}

    def train(model_type: str, **flags: bool) -> tuple[Any, str, Path]:
        key = (model_type, *flags.items())
        if key not in made:
            engine, folder = vision_engine(model_type), tmp_path_factory.mktemp("adapter") / "saved"
            name = f"images-{len(made)}"
            wait(engine.create(name, LoraSpec(rank=4, seed=1, **flags)))
            for _ in range(2):
                run(engine, wait, pass_of(name))
                wait(engine.step(name, AdamParams(learning_rate=0.02, eps=1e-8)))
            wait(engine.save(name, folder, optimizer=False))
            made[key] = engine, name, folder
        return made[key]

    return train


@pytest.fixture(scope="module")
def trained(train: Callable[..., Any]) -> Any:
    """The engine, the name of a model whose B is not zero, and its folder."""
    return train("qwen3_vl")


def reference_of(model_type: str, adapter: Path, folder: Path) -> PeftModel:
    """transformers' whole vision-language model with a saved adapter, whose names are those of the engine's model."""
    weights = load_file(adapter / "adapter_model.safetensors")
    folder.mkdir()
    save_file({whole_name(name): tensor for name, tensor in weights.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    return PeftModel.from_pretrained(vision_model(model_type), folder, is_trainable=True)


def assert_logprobs_and_loss(model: Any, request: Pass, result: Any) -> torch.Tensor:
    """The loss of a model of transformers, whose logprobs of ROWS are those of the result."""
    loss = torch.zeros(())
    for parts, datum, logprobs in zip(ROWS, request.data, result.logprobs, strict=True):
        softmax = model(plain_inputs(parts)).log_softmax(-1)
        expected = softmax.gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0]
        counted = datum.inputs["weights"] != 0
        np.testing.assert_allclose(logprobs[counted], expected.detach().numpy()[counted], atol=5e-5)
        loss = loss - (expected * torch.from_numpy(datum.inputs["weights"])).sum()
    assert result.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-5)
    return loss


def whole_name(name: str) -> str:
    """A module's name in the whole model: transformers has a text model of its own for some types."""
    return re.sub(r"^(base_model\.model\.)?model\.layers\.", r"\1model.language_model.layers.", name)


def gradients_of(engine: Any, name: str) -> dict[str, np.ndarray]:
    """The engine's gradients by the names of the whole model."""
    return {
        f"{whole_name(site)}.{side}": matrix
        for site, pair in engine.trainer.gradients(name).items()
        for side, matrix in zip("AB", pair, strict=True)
    }


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of PEFT
@pytest.mark.parametrize(
    ("model_type", "flags"),
    [("qwen3_vl", {}), ("qwen3_5", {"train_attn": False}), ("qwen3_vl_moe", {"train_mlp": False})],
)
def test_logprobs_and_gradients_equal_transformers(
    model_type: str, flags: dict[str, bool], train: Callable[..., Any], wait: Wait, tmp_path: Path
) -> None:
    """Fails without M-RoPE, without deepstack features, or if rows share the wrong image."""
    engine, model_id, folder = train(model_type, **flags)
    request = pass_of(model_id)
    result = run(engine, wait, request)
    reference = reference_of(model_type, folder, tmp_path / "reference")
    assert_logprobs_and_loss(lambda inputs: reference(**inputs).logits[0], request, result).backward()
    expected = {
        name.removeprefix("base_model.model.").replace(".lora_", ".").removesuffix(".default.weight"): parameter.grad
        for name, parameter in reference.named_parameters()
        if parameter.requires_grad
    }
    gradients = gradients_of(engine, model_id)
    assert_same(gradients, {name: grad.numpy() for name, grad in expected.items()})
    assert not any("visual" in name for name in gradients)
    wait(engine.step(model_id, AdamParams(learning_rate=0.0)))


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_vl_moe", "qwen3_5_moe"])
def test_gradients_equal_those_of_merged_weights(model_type: str, train: Callable[..., Any], wait: Wait) -> None:
    """transformers' model runs on its weights plus s B A, differentiably.

    PEFT has no adapters that experts share, and none on the rows of a projection, as the linear layers here have them.
    """
    engine, model_id, _ = train(model_type)
    request = pass_of(model_id)
    result = run(engine, wait, request)
    plain, model = vision_model(model_type), engine.trainer._model(model_id)
    if "moe" in model_type:
        plain.set_experts_implementation("eager")
    leaves = {
        whole_name(name): LoraPair(*(tensor.clone().requires_grad_() for tensor in (pair.a, pair.b)))
        for name, pair in model.layout.pairs(model.master.detach().clone()).items()
    }
    weights = dict(plain.named_parameters())
    merged = merged_weights(weights, leaves, model.layout.scale)

    def logits(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        plain.model.rope_deltas = None
        return torch.func.functional_call(plain, merged, (), inputs).logits[0]

    assert_logprobs_and_loss(logits, request, result).backward()
    expected = {
        f"{name}.{side}": leaf.grad.numpy()
        for name, pair in leaves.items()
        for side, leaf in zip("AB", (pair.a, pair.b), strict=True)
    }
    assert any(".experts.w1" in name for name in expected) is ("moe" in model_type)
    assert any(".in_proj_q." in name for name in expected) is ("3_5" in model_type)
    assert_same(gradients_of(engine, model_id), expected, 1e-3)
    wait(engine.step(model_id, AdamParams(learning_rate=0.0)))


def test_sequences_alone_give_the_packed_logprobs(trained: tuple[Any, str, Path], wait: Wait) -> None:
    engine, model_id, _ = trained
    together = run(engine, wait, pass_of(model_id, forward_only=True)).logprobs
    for parts, logprobs in zip(ROWS, together, strict=True):
        [alone] = run(engine, wait, pass_of(model_id, [parts], forward_only=True)).logprobs
        np.testing.assert_allclose(logprobs, alone, atol=1e-5)


def test_towers_compute_each_image_once(trained: tuple[Any, str, Path], wait: Wait) -> None:
    engine, model_id, _ = trained
    vision = engine._base.vision
    vision.shrink(0)
    before = vision.computed
    for _ in range(2):
        run(engine, wait, pass_of(model_id, forward_only=True))
    assert vision.computed == before + 2
    vision.shrink(0)
    run(engine, wait, pass_of(model_id, [ROWS[0]], forward_only=True))
    assert vision.computed == before + 3


def test_losses_on_tokens_of_images_are_refused(trained: tuple[Any, str, Path], wait: Wait) -> None:
    """The engine looks at the gradient, of uploaded losses too; the service at the inputs of the others."""
    engine, model_id, _ = trained
    data = (replace(datum_of(ROWS[0]), inputs={"weights": np.ones(12, np.float32)}),)
    request = Pass(model_id=model_id, data=data, loss_fn="cross_entropy")
    with pytest.raises(BadRequest, match="token of an image"):
        run(engine, wait, request)
    for refused in (
        request,
        replace(request, data=(replace(data[0], inputs={}),)),
        replace(request, forward_only=True),
    ):
        with pytest.raises(BadRequest, match=r"data\[0\]: cross_entropy counts a target that is a token of an image"):
            check_pass(refused, engine.card)
    check_pass(pass_of(model_id), engine.card)


def test_wrong_images_fail_their_pass_only(trained: tuple[Any, str, Path], wait: Wait) -> None:
    engine, model_id, _ = trained
    good, bad = pass_of(model_id, forward_only=True), pass_of(model_id, [ROWS[0]], forward_only=True)
    broken = replace(bad.data[0].images[0], data=picture(0, 256, 256)[:300], length=0)
    unreadable = replace(bad, data=(replace(bad.data[0], images=(broken,)),))
    other_size = replace(bad.data[0].images[0], data=B)
    unexpected = replace(bad, data=(replace(bad.data[0], images=(other_size,)),))
    first, second, third = wait(engine.run([unreadable, good, unexpected]))
    assert isinstance(first, BadRequest)
    assert isinstance(third, BadRequest)
    assert "expected_tokens 6" in str(third)
    assert len(second.logprobs) == len(ROWS)


def test_exports_know_the_adapted_modules_without_weights() -> None:
    facts = facts_of_config(vision_model().config, "vl")
    assert {target.name for target in facts.targets if "layers.0." in target.name} == {
        f"model.language_model.layers.0.{name}"
        for name in (
            *(f"self_attn.{side}_proj" for side in "qkvo"),
            *(f"mlp.{side}_proj" for side in ("gate", "up", "down")),
        )
    }
