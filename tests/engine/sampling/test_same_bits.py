"""Results that do not depend on what is computed beside them, where compiled functions multiply."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import engines
from tests.engine.cpu.processor import needs_pairs, needs_panels
from tests.engine.sampling.helpers import sample_request
from tests.models import VOCABULARY, save_tokenizer
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, SampleResult

pytestmark = needs_panels

PROMPT, SAMPLES, TOKENS = 33, 6, 40


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=needs_pairs)])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["dense", "mixture"])
def engine_with(
    request: pytest.FixtureRequest, dtype: str, tmp_path_factory: pytest.TempPathFactory, wait: Any
) -> Iterator[Callable[..., Any]]:
    """Engines of a tiny model whose widths compiled functions multiply, by their settings."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder, sizes = tmp_path_factory.mktemp("aligned"), {"intermediate_size": 192}
    kind: tuple[Any, Any] = (LlamaConfig, LlamaForCausalLM)
    if request.param == "mixture":
        kind = (Qwen3MoeConfig, Qwen3MoeForCausalLM)
        sizes = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
    config = kind[0](
        vocab_size=VOCABULARY, hidden_size=96, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=16, initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes,
    )  # fmt: skip
    kind[1](config).save_pretrained(folder)
    save_tokenizer(folder)
    with engines(lambda _: folder, wait) as engine:
        yield lambda **settings: engine(request.param, dtype=dtype, **settings)


@pytest.fixture(scope="module")
def trained(engine_with: Callable[..., Any], wait: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter whose B is not zero."""
    engine, folder = engine_with(), tmp_path_factory.mktemp("adapter") / "saved"
    wait(engine.create("trained", LoraSpec(rank=8, seed=1)))
    for _ in range(3):
        wait(engine.run([scored("trained", [prompt(seed) for seed in range(4)], forward_only=False)]))
        wait(engine.step("trained", AdamParams(learning_rate=2e-2, eps=1e-8)))
    wait(engine.save("trained", folder, optimizer=False))
    return folder


def prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCABULARY, PROMPT + seed).astype(np.int32)


def scored(model_id: str, rows: list[np.ndarray], *, forward_only: bool = True) -> Pass:
    """The pass that computes the logprobs of rows."""
    ones = [{} if forward_only else {"weights": np.ones(len(row) - 1, np.float32)} for row in rows]
    data = [
        Datum(tokens=row[:-1], targets=row[1:].astype(np.int64), inputs=inputs)
        for row, inputs in zip(rows, ones, strict=True)
    ]
    return Pass(model_id=model_id, data=tuple(data), loss_fn="cross_entropy", forward_only=forward_only)


def sampled(engine: Any, wait: Any, seeds: range) -> list[SampleResult]:
    """Samples of a prompt for each seed, all at the same time."""
    import asyncio

    async def all_of_them() -> list[SampleResult]:
        requests = [
            sample_request(prompt(seed), seed=seed, version="version", num_samples=SAMPLES, max_tokens=TOKENS)
            for seed in seeds
        ]
        return list(await asyncio.gather(*(engine.sample(request) for request in requests)))

    return wait(all_of_them())


def test_trainer_scores_samples_as_the_sampler_did(engine_with: Callable[..., Any], trained: Path, wait: Any) -> None:
    engine = engine_with()
    wait(engine.load("trained", trained, optimizer=False))
    wait(engine.capture("trained", "version"))
    results = sampled(engine, wait, range(3))
    pairs = [(prompt(seed), sequence) for seed, result in enumerate(results) for sequence in result.sequences]
    rows = [np.concatenate([start, sequence.tokens]).astype(np.int32) for start, sequence in pairs]
    (result,) = wait(engine.run([scored("trained", rows)]))
    for (start, sequence), logprobs in zip(pairs, result.logprobs, strict=True):
        assert np.array_equal(sequence.logprobs, logprobs[len(start) - 1 :])
    wait(engine.detach("version"))


def test_logprobs_of_a_row_are_the_same_in_any_pass(engine_with: Callable[..., Any], trained: Path, wait: Any) -> None:
    starts = [prompt(seed) for seed in (0, 0, 0, 1, 1)]
    rows = [np.concatenate([start, prompt(10 + number)[: 5 * number + 3]]) for number, start in enumerate(starts)]
    whole, pieces = engine_with(), engine_with(pass_tokens=32)
    for engine in (whole, pieces):
        wait(engine.load("trained", trained, optimizer=False))
    (together,) = wait(whole.run([scored("trained", rows)]))
    (in_pieces,) = wait(pieces.run([scored("trained", rows)]))
    for row, expected, cut in zip(rows, together.logprobs, in_pieces.logprobs, strict=True):
        (alone,) = wait(whole.run([scored("trained", [row])]))
        assert np.array_equal(alone.logprobs[0], expected)
        assert np.array_equal(cut, expected)


def test_seed_gives_the_same_sample_beside_others(engine_with: Callable[..., Any], trained: Path, wait: Any) -> None:
    engine = engine_with()
    wait(engine.load("trained", trained, optimizer=False))
    wait(engine.capture("trained", "version"))
    together = sampled(engine, wait, range(4))
    for seed, expected in enumerate(together):
        (alone,) = sampled(engine, wait, range(seed, seed + 1))
        for left, right in zip(alone.sequences, expected.sequences, strict=True):
            assert np.array_equal(left.tokens, right.tokens)
            assert np.array_equal(left.logprobs, right.logprobs)
    wait(engine.detach("version"))


def test_adapters_are_garbage_after_their_last_sequence(
    engine_with: Callable[..., Any], wait: Any, trained: Path
) -> None:
    """The tables of a step are kept for the next one, and refer to the weights."""

    async def main() -> None:
        engine = engine_with()
        await engine.attach("left", trained)
        await engine.sample(sample_request(prompt(0), version="left", num_samples=2, max_tokens=5))
        weights = weakref.ref(engine.sampler.versions.weights("left"))
        assert weights().panels
        await engine.detach("left")
        gc.collect()
        assert weights() is None

    wait(main())
