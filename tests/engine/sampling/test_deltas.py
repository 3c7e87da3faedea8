"""Deltas of a request, from every engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.sampling.helpers import sample_request
from tinsmith.engine.base import SampleRequest, SampleResult, SequenceDelta
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.processes.client import start_local

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture(scope="module", params=("fake", "torch", "remote"))
def any_engine(request: pytest.FixtureRequest, tiny_llama: Path, wait: Any) -> Iterator[Any]:
    if request.param == "fake":
        yield FakeEngine(EngineConfig(source=str(tiny_llama), kind="fake"))
    elif request.param == "torch":
        yield request.getfixturevalue("engine")
    else:
        engine = wait(start_local(EngineConfig(source=str(tiny_llama), device="cpu", threads=1)))
        yield engine
        wait(engine.close())


def sample_with_deltas(engine: Any, wait: Any, request: SampleRequest) -> tuple[list[SequenceDelta], SampleResult]:
    deltas: list[SequenceDelta] = []
    sampled = wait(engine.sample(request, deltas.append))
    return deltas, sampled


def test_deltas_add_up_to_the_sequences(any_engine: Any, wait: Any):
    deltas, sampled = sample_with_deltas(
        any_engine, wait, sample_request(num_samples=3, max_tokens=9, topk_sample_logprobs=2)
    )
    assert len(deltas) >= 9  # emitted during sampling, not at the end
    for number, sequence in enumerate(sampled.sequences):
        own = [delta for delta in deltas if delta.sample == number]
        assert [token for delta in own for token in delta.tokens] == sequence.tokens.tolist()
        logprobs = np.array([logprob for delta in own for logprob in delta.logprobs], np.float32)
        np.testing.assert_array_equal(logprobs, sequence.logprobs)
        assert sequence.topk is not None
        tops = [delta.topk for delta in own]
        np.testing.assert_array_equal(np.concatenate([top.token_ids for top in tops if top]), sequence.topk.token_ids)


def test_deltas_do_not_change_the_samples(any_engine: Any, wait: Any):
    _, streamed = sample_with_deltas(any_engine, wait, sample_request(temperature=0.7, seed=3))
    plain = wait(any_engine.sample(sample_request(temperature=0.7, seed=3)))
    np.testing.assert_array_equal(streamed.sequences[0].tokens, plain.sequences[0].tokens)
