"""Routers of a mixture with a vision tower: experts of images' tokens are recorded and replayed as those of text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.conftest import Wait
from tests.engine.images.test_sampling import PROMPTS, request_of, sample
from tests.engine.images.test_training import datum_of, pass_of, run
from tests.vision import plain_inputs, vision_model
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.validation import check_pass
from tinsmith.routed_experts import share_that_differs, to_words

ROUTERS = "qwen3_vl_moe"


def _own_experts(parts: Any) -> np.ndarray:
    """The experts [N, layers, k] that transformers' model chooses for a row."""
    plain, seen = vision_model(ROUTERS), list[Tensor]()
    for module in plain.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda _module, _inputs, output: seen.append(output[2]))
    with torch.no_grad():
        plain(**plain_inputs(parts))
    return torch.stack(seen, 1).numpy().astype(np.uint8)


def test_records_of_images_equal_transformers(vision_engine: Callable[..., Any], wait: Wait) -> None:
    """Once computed and once from the prefix cache. Fails if an image's tokens are recorded at other positions."""
    for _ in range(2):
        requests = [request_of(parts, routed_experts=True, max_tokens=5) for parts in PROMPTS]
        for parts, result in zip(PROMPTS, sample(vision_engine(ROUTERS), wait, *requests), strict=True):
            [sequence] = result.sequences
            assert result.prompt_routed_experts is not None
            assert sequence.routed_experts is not None
            record = np.concatenate([result.prompt_routed_experts, sequence.routed_experts])
            assert share_that_differs(record, _own_experts([*parts, sequence.tokens[:-1].tolist()])) == 0


def test_rows_with_images_replay_their_records(vision_engine: Callable[..., Any], wait: Wait) -> None:
    """The second row has other experts for the first one's tokens: the two share what comes before, and no more."""
    engine, parts = vision_engine(ROUTERS), PROMPTS[0]
    wait(engine.create("replayed", LoraSpec(rank=2, seed=0)))
    own = _own_experts(parts)
    changed = own.copy()
    changed[4:9] = (own[4:9] + 1) % 4  # within the image
    data = [replace(datum_of(parts), routed_experts=to_words(record)) for record in (own, changed)]
    free = run(engine, wait, pass_of("replayed", [parts], forward_only=True))
    request = replace(pass_of("replayed", [parts], forward_only=True), data=tuple(data))
    check_pass(request, engine.card)
    result = run(engine, wait, request)
    text = data[0].inputs["weights"] != 0
    np.testing.assert_allclose(result.logprobs[0][text], free.logprobs[0][text], atol=1e-5)
    assert np.abs(result.logprobs[1] - result.logprobs[0])[text][-2:].max() > 1e-4
    np.testing.assert_allclose(result.logprobs[1][:3], result.logprobs[0][:3], atol=1e-5)
    assert result.metrics["expert_mismatch:mean"] == pytest.approx(5 / len(own) / 2)
