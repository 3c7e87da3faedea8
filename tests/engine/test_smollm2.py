"""Comparisons with the oracle on SmolLM2-135M-Instruct in float32 and bfloat16. Takes minutes, so only in test-all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.inspection import gradients_of
from tests.engine.reference import Reference, assert_same, plain_model
from tests.engine.sampling.helpers import sample_request, trained_logprobs
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass
from tinsmith.engine.config import EngineConfig

pytestmark = pytest.mark.slow

QUESTIONS = (
    "What is 39 + 13? Answer with the number only.",
    "Why is the sky blue?",
    "Write two sentences about a smith who works with tin.",
)
ANSWERS = ("52", "Because of the air.", "He is old. His hands know the work better than he does.")


@pytest.fixture(scope="module")
def engine_in(smollm2: Path, wait: Any) -> Iterator[Callable[[str], Any]]:
    """The engine on SmolLM2 by the base model's dtype, one at a time."""
    from tinsmith.engine.build import build

    made: dict[str, Any] = {}

    def engine(dtype: str) -> Any:
        if dtype not in made:
            for engine in made.values():
                wait(engine.close())
            made.clear()
            made[dtype] = build(EngineConfig(source=str(smollm2), dtype=dtype, device="cpu"))  # type: ignore[arg-type]
        return made[dtype]

    yield engine
    for engine in made.values():
        wait(engine.close())


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    """The questions through the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def to_learn(smollm2: Path, prompts: list[list[int]]) -> Pass:
    """The answers as training data, with the questions masked."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    data = []
    for prompt, answer in zip(prompts, ANSWERS, strict=True):
        row = np.array(prompt + tokenizer(answer, add_special_tokens=False).input_ids + [2])
        weights = (np.arange(len(row) - 1) >= len(prompt) - 1).astype(np.float32)
        data.append(Datum(tokens=row[:-1].astype(np.int32), targets=row[1:], inputs={"weights": weights}))
    return Pass(model_id="trained", data=tuple(data), loss_fn="cross_entropy")


def train(engine: Any, wait: Any, to_learn: Pass, steps: int = 3) -> None:
    """Train the model `trained` for a few steps."""
    wait(engine.create("trained", LoraSpec(rank=8, seed=1)))
    for _ in range(steps):
        wait(engine.run([to_learn]))
        wait(engine.step("trained", AdamParams(learning_rate=2e-3, eps=1e-8)))


def test_greedy_tokens_match_transformers(engine_in: Any, smollm2: Path, prompts: Any, wait: Any):
    engine, model = engine_in("float32"), plain_model(smollm2, torch.float32)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, pad_token_id=2
        )
        result = wait(engine.sample(sample_request(prompt, temperature=0.0, max_tokens=48, stop_tokens=None)))
        assert result.sequences[0].tokens.tolist() == out[0, len(prompt) :].tolist()


def test_trained_logprobs_and_gradients_match_oracle(
    engine_in: Any, smollm2: Path, to_learn: Pass, wait: Any, tmp_path: Path
):
    engine = engine_in("float32")
    train(engine, wait, to_learn)
    wait(engine.save("trained", tmp_path / "saved", optimizer=False))
    (result,) = wait(engine.run([to_learn]))
    with torch.no_grad():  # PyTorch's own softmax is up to 1.5e-5 off in float32, where there is no AVX-512
        loss, logprobs = Reference(smollm2, tmp_path / "saved").loss(to_learn)
    learned = sum(int(datum.inputs["weights"].sum()) for datum in to_learn.data)
    assert result.metrics["loss:sum"] == pytest.approx(float(loss), abs=1e-5 * learned)
    for actual, wanted in zip(result.logprobs, logprobs, strict=True):
        gaps = np.abs(actual - wanted.numpy())
        assert gaps.mean() < 1e-5
        assert gaps.max() < 1e-4
    # The oracle's gradients of the body are up to 6e-4 apart between float32 and float64, so the engine's are compared
    # with those in float32. Of the head, those in float32 are 1.2e-4 from float64, and the engine's 4e-5 at most.
    wanted = dict[str, np.ndarray]()
    for dtype, part in ((torch.float32, "layers"), (torch.float64, "lm_head")):
        oracle = Reference(smollm2, tmp_path / "saved", dtype)
        oracle.backward(to_learn)
        wanted |= {name: gradient for name, gradient in oracle.gradients().items() if f".{part}." in name}
    assert_same(gradients_of(engine, "trained"), wanted)


@pytest.mark.parametrize(("dtype", "mean", "most"), [("float32", 1e-5, 1e-4), ("bfloat16", 0.08, 1.5)])
def test_sampled_logprobs_match_trainer(
    dtype: str, mean: float, most: float, engine_in: Any, prompts: Any, to_learn: Pass, wait: Any
):
    engine = engine_in(dtype)
    wait(engine.create("base", LoraSpec(rank=1, seed=0)))
    train(engine, wait, to_learn)
    wait(engine.capture("trained", "version"))
    for model_id, version in (("base", None), ("trained", "version")):
        gaps = []
        for prompt in prompts:
            result = wait(engine.sample(sample_request(prompt, version=version, num_samples=4, max_tokens=48)))
            for sequence in result.sequences:
                trained = trained_logprobs(engine, wait, model_id, prompt, sequence.tokens)
                gaps.append(np.abs(sequence.logprobs - trained))
        assert np.concatenate(gaps).mean() < mean
        assert np.concatenate(gaps).max() < most
    wait(engine.detach("version"))


def test_bfloat16_logprobs_are_close_to_float32(
    engine_in: Any, smollm2: Path, to_learn: Pass, wait: Any, tmp_path: Path
):
    train(engine_in("float32"), wait, to_learn)
    wait(engine_in("float32").save("trained", tmp_path / "saved", optimizer=False))
    (exact,) = wait(engine_in("float32").run([to_learn]))
    engine = engine_in("bfloat16")
    wait(engine.load("trained", tmp_path / "saved", optimizer=False))
    (rounded,) = wait(engine.run([to_learn]))
    gaps = np.abs(np.concatenate(exact.logprobs) - np.concatenate(rounded.logprobs))
    assert gaps.mean() < 0.08
