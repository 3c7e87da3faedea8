"""The engine creates no tensor on the default device of torch, so CPU tests cover device placement on GPUs.

The default device is set to `meta` while the model is on the CPU. A tensor created without a device then has no
storage, and the first operation with one of the model's tensors raises an error, as a CPU tensor would on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.data import LOSSES, pass_for
from tests.engine.sampling.helpers import sample_request
from tinsmith.engine.base import AdamParams, LoraSpec
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.torch_engine import TorchEngine


@pytest.fixture
def engine(tiny_llama: Path, wait: Any) -> Iterator[TorchEngine]:
    engine = TorchEngine(EngineConfig(source=str(tiny_llama), dtype="bfloat16", device="cpu"))
    with torch.device("meta"):
        wait(engine.create("m", LoraSpec(rank=4, seed=0)))
        yield engine


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_training_places_tensors_explicitly(engine: TorchEngine, wait: Any, loss_fn: str):
    (result,) = wait(engine.run([pass_for(loss_fn, "m")]))
    assert all(np.isfinite(values).all() for values in result.logprobs)
    assert wait(engine.step("m", AdamParams(grad_clip_norm=1.0)))["grad_norm"] > 0


def test_entropies_and_saved_states_place_tensors_explicitly(engine: TorchEngine, wait: Any, tmp_path: Path):
    (result,) = wait(engine.run([pass_for("ppo", "m", config={"return_entropy": True, "entropy_coef": 0.1})]))
    assert result.entropies is not None
    wait(engine.step("m", AdamParams()))
    wait(engine.save("m", tmp_path / "state", optimizer=True))
    wait(engine.load("m", tmp_path / "state", optimizer=True))
    wait(engine.run([pass_for("ppo", "m")]))
    wait(engine.step("m", AdamParams()))


def test_sampling_places_tensors_explicitly(engine: TorchEngine, wait: Any, tmp_path: Path):
    wait(engine.run([pass_for("cross_entropy", "m")]))
    wait(engine.step("m", AdamParams(learning_rate=1e-2)))
    wait(engine.capture("m", "version"))
    settings: dict[str, Any] = {"num_samples": 3, "max_tokens": 80, "version": "version"}
    for extra in (
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "topk_sample_logprobs": 3},
        {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 2},
    ):
        result = wait(engine.sample(sample_request(**settings, **extra)))
        assert len(result.sequences) == 3
    wait(engine.persist("version", tmp_path / "version"))
    wait(engine.detach("version"))
    wait(engine.attach("again", tmp_path / "version"))
    assert wait(engine.sample(sample_request(version="again", max_tokens=2))).sequences[0].tokens.size == 2
