"""Training on images against transformers with PEFT: logprobs and gradients of rows with and without images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from tests.engine.conftest import Wait
from tests.engine.images.conftest import Parts, row_of
from tests.engine.reference import assert_same
from tests.vision import END, START, picture, plain_inputs, vision_model
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass
from tinsmith.engine.exchange.forms import facts_of_config
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
def trained(vision_engine: Callable[..., Any], wait: Wait, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The engine, the name of a model whose B is not zero, and its folder."""
    engine, folder = vision_engine(), tmp_path_factory.mktemp("adapter") / "saved"
    wait(engine.create("images", LoraSpec(rank=4, seed=1)))
    for _ in range(2):
        run(engine, wait, pass_of("images"))
        wait(engine.step("images", AdamParams(learning_rate=0.02, eps=1e-8)))
    wait(engine.save("images", folder, optimizer=False))
    return engine, "images", folder


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of PEFT
def test_logprobs_and_gradients_equal_transformers(trained: tuple[Any, str, Path], wait: Wait) -> None:
    """Fails without M-RoPE, without deepstack features, or if rows share the wrong image."""
    engine, model_id, folder = trained
    request = pass_of(model_id)
    result = run(engine, wait, request)
    reference = PeftModel.from_pretrained(vision_model(), folder, is_trainable=True)
    loss = torch.zeros(())
    for parts, datum, logprobs in zip(ROWS, request.data, result.logprobs, strict=True):
        softmax = reference(**plain_inputs(parts)).logits[0].log_softmax(-1)
        expected = softmax.gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0]
        counted = datum.inputs["weights"] != 0
        np.testing.assert_allclose(logprobs[counted], expected.detach().numpy()[counted], atol=2e-5)
        loss = loss - (expected * torch.from_numpy(datum.inputs["weights"])).sum()
    loss.backward()
    assert result.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-5)
    gradients = {
        f"{name}.{side}": matrix
        for name, pair in engine.trainer.gradients(model_id).items()
        for side, matrix in zip("AB", pair, strict=True)
    }
    expected_gradients = {
        name.removeprefix("base_model.model.").replace(".lora_", ".").removesuffix(".default.weight"): parameter.grad
        for name, parameter in reference.named_parameters()
        if parameter.requires_grad
    }
    assert_same(gradients, {name: grad.numpy() for name, grad in expected_gradients.items()})
    assert not any("visual" in name for name in gradients)
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
