"""Router replay in a group of ranks against one engine, with images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.cluster.trainers.test_ranks import assert_close, assert_same_weights, engine_and_group
from tests.engine.cluster.trainers.threads import ThreadGroup
from tests.engine.images.test_training import ROWS, datum_of, pass_of
from tests.vision import save_vision_model
from tinsmith.engine.base import AdamParams, LoraSpec, PassResult
from tinsmith.engine.build import build
from tinsmith.engine.config import EngineConfig
from tinsmith.routed_experts import to_words

LAYERS, CHOSEN, EXPERTS = 3, 2, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(Path(tmp_path_factory.mktemp("vision")), "qwen3_vl_moe")


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[ThreadGroup]:
    group = ThreadGroup(folder, 2)
    yield group
    group.close()


def _replayed(model_id: str, **config: float) -> Any:
    """A pass whose rows replay experts drawn at random."""
    draw, data = np.random.default_rng(0), []
    for seed, parts in enumerate((*ROWS, ROWS[1])):
        datum = datum_of(parts, seed=seed)
        scores = draw.random((len(datum.tokens), LAYERS, EXPERTS))
        record = scores.argsort(2)[:, :, :CHOSEN].astype(np.uint8)
        data.append(replace(datum, routed_experts=to_words(record)))
    return replace(pass_of(model_id), data=tuple(data), loss_config=config)


def test_ranks_replay_as_one_engine_does(group: ThreadGroup, folder: Path, wait: Any, tmp_path: Path) -> None:
    """Fails if a rank leaves its routers free, or if the leading one reports its own rows' mismatch alone."""
    engine: Any = build(EngineConfig(source=str(folder), dtype="float32", device="cpu", threads=1))
    outcomes = list[list[PassResult]]()
    for target, execute in engine_and_group(group, engine, wait):
        execute(target.create("routed", LoraSpec(rank=4, seed=1)))
        outcomes.append([])
        for _ in range(2):
            outcomes[-1] += execute(target.run([_replayed("routed"), _replayed("routed", router_replay=0)]))
            execute(target.step("routed", AdamParams(learning_rate=1e-3)))
    for expected, actual in zip(*outcomes, strict=True):
        assert_close(actual, expected)
    replayed, compared = outcomes[1][:2]
    assert replayed.metrics["expert_mismatch:mean"] > 0.5
    assert np.abs(replayed.logprobs[0] - compared.logprobs[0]).max() > 1e-3
    assert_same_weights(group, engine, wait, "routed", tmp_path)
