"""A request's tokens are told while they are made, by every engine, and add up to its answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.sampling.helpers import ask
from tinsmith.engine.base import SampleRequest, SampleResult, SequenceDelta
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.process import RemoteEngine


@pytest.fixture(scope="module", params=("fake", "torch", "remote"))
def any_engine(request: pytest.FixtureRequest, tiny_llama: Path, wait: Any) -> Iterator[Any]:
    if request.param == "fake":
        yield FakeEngine(EngineConfig(source=str(tiny_llama), kind="fake"))
    elif request.param == "torch":
        yield request.getfixturevalue("engine")
    else:
        engine = wait(RemoteEngine.start(EngineConfig(source=str(tiny_llama), device="cpu", threads=1)))
        yield engine
        wait(engine.close())


def listened(engine: Any, wait: Any, request: SampleRequest) -> tuple[list[SequenceDelta], SampleResult]:
    pieces: list[SequenceDelta] = []
    sampled = wait(engine.sample(request, pieces.append))
    return pieces, sampled


def test_pieces_add_up_to_the_sequences(any_engine: Any, wait: Any):
    pieces, sampled = listened(any_engine, wait, ask(num_samples=3, max_tokens=9, topk_sample_logprobs=2))
    assert len(pieces) >= 9  # told on the way, not at the end
    for number, sequence in enumerate(sampled.sequences):
        mine = [piece for piece in pieces if piece.sample == number]
        assert [token for piece in mine for token in piece.tokens] == sequence.tokens.tolist()
        told = np.array([logprob for piece in mine for logprob in piece.logprobs], np.float32)
        np.testing.assert_array_equal(told, sequence.logprobs)
        assert sequence.topk is not None
        tops = [piece.topk for piece in mine]
        np.testing.assert_array_equal(np.concatenate([top.token_ids for top in tops if top]), sequence.topk.token_ids)


def test_listening_changes_nothing(any_engine: Any, wait: Any):
    _, on_delta = listened(any_engine, wait, ask(temperature=0.7, seed=3))
    silent = wait(any_engine.sample(ask(temperature=0.7, seed=3)))
    np.testing.assert_array_equal(on_delta.sequences[0].tokens, silent.sequences[0].tokens)
