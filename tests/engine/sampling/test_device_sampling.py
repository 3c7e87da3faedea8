"""Sampling without reads gives the tokens of the CPU's sampling, bit for bit."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.engine.sampling.device_sampling import sample_on_device
from tinsmith.engine.sampling.token_sampling import PARTIAL_SORT, SamplingRule, sample_tokens

RULES = st.builds(
    SamplingRule,
    temperature=st.sampled_from([0.0, 1e-38, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 1, 3, 40, PARTIAL_SORT - 1, PARTIAL_SORT, PARTIAL_SORT + 1, 10**6]),
    top_p=st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.999, 1.0]),
    top_logprobs=st.sampled_from([0, 0, 1, 5]),
)


@given(st.data(), st.sampled_from([7, 700, PARTIAL_SORT, PARTIAL_SORT + 900]), st.integers(0, 2**32 - 1))
def test_device_sampling_equals_the_cpus(data: st.DataObject, vocabulary: int, seed: int) -> None:
    rules = data.draw(st.lists(RULES, min_size=1, max_size=5))
    draw = np.random.default_rng(seed)
    logits = torch.from_numpy(draw.normal(size=(len(rules), vocabulary)).astype(np.float32))
    logits *= torch.from_numpy(draw.choice([0.0, 0.3, 3.0, 30.0], (len(rules), 1)).astype(np.float32))
    if draw.random() < 0.5:
        logits = logits.round()  # ties
    rows = np.sort(draw.integers(0, len(rules), 6)).tolist()
    uniforms = draw.random(6).tolist()
    expected = sample_tokens(logits.clone(), rules, uniforms, rows)
    actual = sample_on_device(logits.clone(), rules, uniforms, rows)
    assert actual.tokens.tolist() == expected.tokens.tolist()
    assert actual.logprobs.tolist() == expected.logprobs.tolist()
    for left, right in zip(actual.top_logprobs, expected.top_logprobs, strict=True):
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            assert left.logprobs.tolist() == right.logprobs.tolist()
            assert left.token_ids.dtype == right.token_ids.dtype
            assert left.token_ids.shape == right.token_ids.shape


def test_nan_row_does_not_affect_others_on_device() -> None:
    logits = torch.zeros(3, 536)
    logits[1] = float("nan")
    for rule in (SamplingRule(1.0, -1, 1.0), SamplingRule(0.0, -1, 1.0), SamplingRule(1.0, 7, 0.9)):
        sampled = sample_on_device(logits.clone(), [rule] * 3, [0.5] * 3, range(3))
        assert 0 <= int(sampled.tokens[1]) < 536
        assert sampled.logprobs.isfinite().tolist() == [True, False, True]
