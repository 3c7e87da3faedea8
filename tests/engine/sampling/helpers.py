"""Helpers of sampling tests: requests, comparison of samples, the trainer's logprobs of samples."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.engine.base import Datum, Pass, SampleRequest, SampleResult, SequenceDelta

_numbers = count()

PROMPT = (1, 349, 201, 410, 297, 77, 130, 9, 2, 201, 1, 355, 201)
NEVER: dict[str, Any] = {"stop_tokens": ()}


def sample_request(prompt: Any = PROMPT, **changes: Any) -> SampleRequest:
    """A request with a unique id; by default 16 tokens without stops."""
    settings: dict[str, Any] = {"max_tokens": 16, "seed": 1, **NEVER, **changes}
    return SampleRequest(request_id=f"request-{next(_numbers)}", prompt=np.asarray(prompt, dtype=np.int32), **settings)


async def sampling(engine: Any, request: SampleRequest, tokens: int = 1) -> asyncio.Task[SampleResult]:
    """Start a request, and wait until so many tokens of its first sample are there, or until it has failed."""
    begun, seen = asyncio.Event(), 0

    def count_tokens(delta: SequenceDelta) -> None:
        nonlocal seen
        seen += len(delta.tokens) if delta.sample == 0 else 0
        if seen >= tokens:
            begun.set()

    running = asyncio.create_task(engine.sample(request, count_tokens))
    running.add_done_callback(lambda _: begun.set())
    await begun.wait()
    return running


def trained_logprobs(engine: Any, wait: Any, model_id: str, prompt: Any, tokens: np.ndarray) -> np.ndarray:
    """float32 [len(tokens)]: logprobs of `tokens` after `prompt`, by the trainer's forward pass."""
    whole = np.concatenate([np.asarray(prompt, dtype=np.int32), tokens]).astype(np.int32)
    datum = Datum(tokens=whole[:-1], targets=whole[1:].astype(np.int64))
    request = Pass(model_id=model_id, data=(datum,), loss_fn="cross_entropy", forward_only=True)
    (result,) = wait(engine.run([request]))
    return result.logprobs[0][len(prompt) - 1 :]


def assert_same_samples(actual: SampleResult, expected: SampleResult, atol: float = 1e-5) -> None:
    """Assert equal tokens and stop reasons, and close logprobs."""
    assert len(actual.sequences) == len(expected.sequences)
    for left, right in zip(actual.sequences, expected.sequences, strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=atol)
        assert left.stop_reason == right.stop_reason


def texts(folder: Path, sampled: SampleResult) -> list[str]:
    """The text of each sequence."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(sequence.tokens) for sequence in sampled.sequences]
