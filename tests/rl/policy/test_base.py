"""Learning-rate schedules, conflicting settings, and request seeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.sampling import SamplingConfig, request_seed


def learning_rates(**changes) -> list[float]:
    """Learning rates of ten steps."""
    config = OptimizerConfig(learning_rate=1.0, **changes)
    return [round(config.learning_rate_at(step, 10), 4) for step in range(1, 11)]


def test_learning_rate_follows_its_schedule():
    assert learning_rates() == [1.0] * 10
    assert learning_rates(schedule="linear") == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    cosine = learning_rates(schedule="cosine")
    assert cosine[0] == 1.0
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[5] == pytest.approx(0.5)


def test_warmup_rises_to_the_full_rate():
    assert learning_rates(schedule="linear", warmup_steps=2)[:4] == [0.5, 1.0, 1.0, 0.875]
    assert learning_rates(schedule="linear", warmup_ratio=0.25)[:4] == [0.5, 1.0, 1.0, 0.875]
    assert learning_rates(schedule="linear", min_ratio=0.5) == pytest.approx([1.0 - 0.05 * step for step in range(10)])
    assert learning_rates(schedule="cosine", min_ratio=0.1)[5] == pytest.approx(0.1 + 0.9 * 0.5)
    assert learning_rates(schedule="constant") == [1.0] * 10
    with pytest.raises(ValueError, match="leave out one"):
        OptimizerConfig(warmup_steps=1, warmup_ratio=0.1)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    steps=st.integers(1, 40),
    warmup=st.integers(0, 45),
    ratio=st.floats(0, 0.99),
    floor=st.floats(0, 1),
    more=st.integers(0, 60),
)
def test_decay_ends_with_the_run_and_never_below_zero(schedule, steps, warmup, ratio, floor, more):
    share = {} if warmup else {"warmup_ratio": ratio}
    decay = {} if schedule == "constant" else {"min_ratio": floor}
    config = OptimizerConfig(learning_rate=2.0, schedule=schedule, warmup_steps=warmup, **share, **decay)
    first = warmup or int(ratio * steps)
    rates = [config.learning_rate_at(step, steps) for step in range(1, steps + more + 2)]
    assert all(0 < rate <= 2.0 for rate in rates[:steps])  # every step of the run trains
    rising, falling = rates[:first], rates[first:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    end = 2.0 if schedule == "constant" else 2.0 * floor
    if first < steps:
        assert all(rate == pytest.approx(end, abs=1e-12) for rate in rates[steps:])


def test_stop_is_strings_or_token_ids():
    assert SamplingConfig.model_validate({"stop": ["\n", "User:"]}).stop == ("\n", "User:")
    assert SamplingConfig.model_validate({"stop": [2, 7]}).stop == (2, 7)
    assert SamplingConfig.model_validate({"stop": []}).stop == ()
    with pytest.raises(ValidationError, match="strings or token ids, not both"):
        SamplingConfig.model_validate({"stop": ["\n", 2]})


def test_load_from_rejects_adapter_settings():
    with pytest.raises(ValidationError, match="remove rank, train_mlp"):
        ModelConfig(name="m", load_from="tinker://a/weights/b", rank=8, train_mlp=False)


def test_request_seeds_are_distinct():
    places = [(step, group) for step in range(1, 60) for group in range(16)] + [(1, group, 1) for group in range(200)]
    seeds = {request_seed(seed, *place) for seed in (0, 1) for place in places}
    assert len(seeds) == 2 * len(places)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(0, 3, 4) == request_seed(0, 3, 4)
