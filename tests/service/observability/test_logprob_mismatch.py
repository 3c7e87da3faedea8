"""mean_logprob_gap: difference of sampler and trainer logprobs in training data."""

from __future__ import annotations

import numpy as np
import pytest

from tinsmith.engine.base import Datum, Pass, PassResult
from tinsmith.service.observability import metrics


def datum(**inputs: list[float]) -> Datum:
    arrays = {name: np.array(values, np.float32) for name, values in inputs.items()}
    return Datum(tokens=np.arange(3, dtype=np.int32), targets=np.arange(3), inputs=arrays)


def request(*data: Datum, loss_fn: str = "importance_sampling") -> tuple[Pass, PassResult]:
    logprobs = tuple(np.array([-9.0, -1.0, -2.0], np.float32) for _ in data)
    return Pass(model_id="m", data=data, loss_fn=loss_fn), PassResult(logprobs=logprobs, metrics={"loss:sum": 0.0})


def test_gap_is_the_mean_over_tokens_with_an_advantage() -> None:
    first = datum(logprobs=[0.0, -1.5, -2.0], advantages=[0.0, 0.5, 0.5])
    second = datum(logprobs=[0.0, -1.0, -1.0], advantages=[0.0, 0.0, -2.0])
    assert metrics.mean_logprob_gap(*request(first, second)) == pytest.approx((0.5 + 0.0 + 1.0) / 3)


def test_gap_is_none_without_sampled_tokens() -> None:
    assert metrics.mean_logprob_gap(*request(datum(weights=[1.0, 1.0, 1.0]), loss_fn="cross_entropy")) is None
    assert metrics.mean_logprob_gap(*request(datum(logprobs=[0.0, 0.0, 0.0], advantages=[0.0, 0.0, 0.0]))) is None
