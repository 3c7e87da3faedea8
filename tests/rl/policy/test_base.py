"""Learning rates, settings that contradict each other, and seeds."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.base import ModelConfig, SamplingConfig, request_seed


def course(**changes) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **changes)
    return [round(config.learning_rate_at(step, 10), 4) for step in range(1, 11)]


def test_the_learning_rate_follows_its_schedule():
    assert course() == [1.0] * 10
    assert course(schedule="linear") == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    cosine = course(schedule="cosine")
    assert cosine[0] == 1.0
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[5] == pytest.approx(0.5)


def test_warm_up_rises_to_the_full_rate():
    assert course(schedule="linear", warmup_steps=2)[:4] == [0.5, 1.0, 1.0, 0.875]
    assert course(schedule="linear", warmup_ratio=0.25)[:4] == [0.5, 1.0, 1.0, 0.875]
    assert course(schedule="linear", min_ratio=0.5) == pytest.approx([1.0 - 0.05 * step for step in range(10)])
    assert course(schedule="cosine", min_ratio=0.1)[5] == pytest.approx(0.1 + 0.9 * 0.5)
    assert course(schedule="constant") == [1.0] * 10
    with pytest.raises(ValueError, match="leave out one"):
        OptimizerConfig(warmup_steps=1, warmup_ratio=0.1)


def test_stop_is_strings_or_tokens():
    assert SamplingConfig.model_validate({"stop": ["\n", "User:"]}).stop == ("\n", "User:")
    assert SamplingConfig.model_validate({"stop": [2, 7]}).stop == (2, 7)
    assert SamplingConfig.model_validate({"stop": []}).stop == ()
    with pytest.raises(ValidationError, match="strings or token ids, not both"):
        SamplingConfig.model_validate({"stop": ["\n", 2]})


def test_weights_from_elsewhere_bring_their_own_shape():
    with pytest.raises(ValidationError, match="leave out rank, train_mlp"):
        ModelConfig(name="m", load_from="tinker://a/weights/b", rank=8, train_mlp=False)


def test_every_request_has_a_seed_of_its_own():
    places = [(step, group) for step in range(1, 60) for group in range(16)] + [(1, group, 1) for group in range(200)]
    seeds = {request_seed(seed, *place) for seed in (0, 1) for place in places}
    assert len(seeds) == 2 * len(places)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(0, 3, 4) == request_seed(0, 3, 4)
