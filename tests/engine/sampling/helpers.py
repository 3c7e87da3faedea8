"""What the sampler's tests share: a trained version, a request in one line, and the trainer's word on what was said."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.engine.base import Datum, Pass, SampleRequest, SampleResult

_numbers = count()

PROMPT = (1, 349, 201, 410, 297, 77, 130, 9, 2, 201, 1, 355, 201)
NEVER: dict[str, Any] = {"stop_tokens": ()}


def ask(prompt: Any = PROMPT, **changes: Any) -> SampleRequest:
    """A request with a name of its own; 16 tokens that nothing stops unless told otherwise."""
    settings: dict[str, Any] = {"max_tokens": 16, "seed": 1, **NEVER, **changes}
    return SampleRequest(request_id=f"request-{next(_numbers)}", prompt=np.asarray(prompt, dtype=np.int32), **settings)


def trained_logprobs(engine: Any, wait: Any, model_id: str, prompt: Any, tokens: np.ndarray) -> np.ndarray:
    """float32 [len(tokens)]: what the trainer's forward says of `tokens` after `prompt`."""
    whole = np.concatenate([np.asarray(prompt, dtype=np.int32), tokens]).astype(np.int32)
    datum = Datum(tokens=whole[:-1], targets=whole[1:].astype(np.int64))
    request = Pass(model_id=model_id, data=(datum,), loss_fn="cross_entropy", forward_only=True)
    (result,) = wait(engine.run([request]))
    return result.logprobs[0][len(prompt) - 1 :]


def assert_same_samples(found: SampleResult, wanted: SampleResult, atol: float = 1e-5) -> None:
    """The same tokens with the same logprobs."""
    assert len(found.sequences) == len(wanted.sequences)
    for one, two in zip(found.sequences, wanted.sequences, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=atol)
        assert one.stop_reason == two.stop_reason


def texts(folder: Path, sampled: SampleResult) -> list[str]:
    """Each sequence as text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(sequence.tokens) for sequence in sampled.sequences]
