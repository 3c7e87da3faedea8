"""A base model sharded over two ranks, with a sampling process beside them: trained and sampled through the SDK.

Losses, samples and weights equal those of one engine that holds the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types

from tests.service.conftest import datum
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

ROWS = [[3 + (11 * row + 5 * token) % 400 for token in range(10 + 7 * row)] for row in range(6)]
PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
STEPS = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of training for some steps and sampling from the version after them."""

    losses: list[float]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    weights: dict[str, np.ndarray]


@contextmanager
def served(model: Path, data: Path, cluster: ClusterConfig) -> Iterator[tinker.ServiceClient]:
    config = ServeConfig(
        models=(f"tiny={model}",), data=data, dtype="float32", device="cpu", threads=1, cluster=cluster
    )
    with embedded(config) as (url, key):
        client = tinker.ServiceClient(base_url=url, api_key=key)
        yield client
        client.close("success").result()


def trained(client: tinker.ServiceClient, data: Path) -> Outcome:
    training = client.create_lora_training_client("tiny", rank=4, seed=1).result(timeout=600)
    losses = []
    for _ in range(STEPS):
        passed = training.forward_backward([datum(row) for row in ROWS], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=600)
        losses.append(passed.result(timeout=600).metrics["loss:sum"])
    sampler = training.save_weights_and_get_sampling_client().result(timeout=600)
    answer = sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=8, temperature=0.0)).result(timeout=600)
    training.save_weights_for_sampler("final").result(timeout=600)
    [folder] = [file.parent for file in (data / "checkpoints").rglob("adapter_model.safetensors")][-1:]
    return Outcome(
        losses=losses,
        tokens=[list(sequence.tokens) for sequence in answer.sequences],
        logprobs=[list(sequence.logprobs or []) for sequence in answer.sequences],
        weights=load_file(folder / "adapter_model.safetensors"),
    )


def assert_equal(actual: Outcome, expected: Outcome, tolerance: float) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=1e-5)
    assert actual.losses[-1] < actual.losses[0]
    assert actual.tokens == expected.tokens
    for ours, theirs in zip(actual.logprobs, expected.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance)
    for name, tensor in expected.weights.items():
        assert float(np.linalg.norm(actual.weights[name] - tensor)) <= 2e-5 * float(np.linalg.norm(tensor)), name


def test_sharded_base_is_trained_and_sampled_by_torch(tiny_llama: Path, tmp_path: Path) -> None:
    with served(tiny_llama, tmp_path / "whole", ClusterConfig()) as client:
        expected = trained(client, tmp_path / "whole")
    with served(tiny_llama, tmp_path / "sharded", ClusterConfig(trainers=2, shard=True, samplers=1)) as client:
        assert_equal(trained(client, tmp_path / "sharded"), expected, 1e-4)
