"""Recomputing layers give the same results and save only their input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.data import pass_for
from tests.engine.inspection import gradients_of
from tests.engine.reference import assert_same


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_recomputing_does_not_change_results(kind: str, pair: Any, wait: Any):
    runs = []
    for settings in ({"recompute": "never"}, {"recompute": "always"}):
        engine, model_id, oracle = pair(kind, **settings)
        request = pass_for("cross_entropy", model_id, seed=4)
        (result,) = wait(engine.run([request]))
        oracle.backward(request)
        assert_same(gradients_of(engine, model_id), oracle.gradients())
        runs.append((result, gradients_of(engine, model_id)))
    for left, right in zip(runs[0][0].logprobs, runs[1][0].logprobs, strict=True):
        np.testing.assert_array_equal(left, right)
    assert_same(runs[0][1], runs[1][1], tolerance=0)


def test_auto_recomputes_only_long_rows(pair: Any, wait: Any, monkeypatch: pytest.MonkeyPatch):
    engine, model_id, oracle = pair(pass_tokens=32, recompute="auto")
    monkeypatch.setattr(engine.trainer._runner, "cuts", False)  # as on a GPU; a CPU computes them in pieces
    layer, seen = engine.trainer._base.body.layers[0], []
    forward = layer.layer.forward
    layer.layer.forward = lambda *args, **settings: (seen.append(args[0].shape[1]), forward(*args, **settings))[1]
    request = pass_for("cross_entropy", model_id, lengths=(20, 64, 65))
    wait(engine.run([request]))
    layer.layer.forward = forward
    assert sorted(seen) == [20, 64, 65, 65]
    oracle.backward(request)
    assert_same(gradients_of(engine, model_id), oracle.gradients())
