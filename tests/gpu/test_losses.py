"""Comparisons with the oracle on a GPU; run by `make gpu-check`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.data import LOSSES, pass_for
from tests.engine.inspection import gradients_of
from tests.engine.reference import assert_same
from tests.engine.sampling.helpers import PROMPT, sample_request, trained_logprobs
from tests.models import KINDS
from tinsmith.engine.base import AdamParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_losses_and_gradients_on_gpu_match_oracle(loss_fn: str, kind: str, pair: Any, device: str, wait: Any):
    engine, model_id, oracle = pair(kind, device=device)
    request = pass_for(loss_fn, model_id)
    (result,) = wait(engine.run([request]))
    _, logprobs = oracle.loss(request)
    oracle.backward(request)
    for actual, wanted in zip(result.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(actual, wanted.detach().numpy(), atol=1e-4)
    assert_same(gradients_of(engine, model_id), oracle.gradients(), tolerance=1e-3)


def test_sampled_logprobs_on_gpu_match_trainer_after_step(pair: Any, device: str, wait: Any):
    engine, model_id, _ = pair(device=device)
    wait(engine.run([pass_for("cross_entropy", model_id)]))
    wait(engine.step(model_id, AdamParams(learning_rate=1e-2)))
    wait(engine.capture(model_id, "stepped"))
    result = wait(engine.sample(sample_request(version="stepped", num_samples=4, max_tokens=40)))
    wait(engine.detach("stepped"))
    for sequence in result.sequences:
        trained = trained_logprobs(engine, wait, model_id, PROMPT, sequence.tokens)
        np.testing.assert_allclose(sequence.logprobs, trained, atol=1e-3)
