"""A layer that computes again in the backward gives the same numbers, and keeps its input alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.data import pass_for
from tests.engine.inspection import gradients_of
from tests.engine.reference import assert_same


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_recomputing_changes_nothing(kind: str, pair: Any, wait: Any):
    found = []
    for settings in ({"recompute": "never"}, {"recompute": "always"}):
        engine, model_id, oracle = pair(kind, **settings)
        request = pass_for("cross_entropy", model_id, seed=4)
        (result,) = wait(engine.run([request]))
        oracle.backward(request)
        assert_same(gradients_of(engine, model_id), oracle.gradients())
        found.append((result, gradients_of(engine, model_id)))
    for one, two in zip(found[0][0].logprobs, found[1][0].logprobs, strict=True):
        np.testing.assert_array_equal(one, two)
    assert_same(found[0][1], found[1][1], tolerance=0)


def test_auto_recomputes_rows_beyond_the_budget_alone(pair: Any, wait: Any):
    engine, model_id, oracle = pair(pass_tokens=32, recompute="auto")
    layer, seen = engine.trainer._base.body.layers[0], []
    forward = layer.layer.forward
    layer.layer.forward = lambda *args, **settings: (seen.append(args[0].shape[1]), forward(*args, **settings))[1]
    request = pass_for("cross_entropy", model_id, lengths=(20, 64, 65))
    wait(engine.run([request]))
    layer.layer.forward = forward
    assert sorted(seen) == [20, 64, 65, 65]
    oracle.backward(request)
    assert_same(gradients_of(engine, model_id), oracle.gradients())
