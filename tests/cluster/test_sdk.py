"""The unmodified SDK on a cluster of two training and two sampling processes, of which each is killed in the middle.

The weights, the moments and the samples equal those of a quiet run, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from tests.cluster.conftest import RayCluster
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:DEPRECATED"),  # load_state of the SDK
]

STEPS = 12
ROWS = [[3 + (7 * row + 5 * token) % 90 for token in range(12 + 3 * row)] for row in range(6)]
Outcome = tuple[list[float], list[list[int]], dict[str, bytes]]


@pytest.fixture(scope="module")
def quiet(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What a run without deaths gives."""
    with served(tmp_path_factory.mktemp("quiet"), tiny_llama, ClusterConfig(trainers=2, samplers=2)) as service:
        return train(*service)


@contextlib.contextmanager
def served(data: Path, model: Path, cluster: ClusterConfig) -> Iterator[tuple[str, str, Path]]:
    """URL, key and data folder of a service."""
    config = ServeConfig(
        models=(f"toy={model}",),
        data=data,
        dtype="float32",
        device="cpu",
        threads=1,
        cluster=cluster,
        deterministic=True,
        capture_every=4,
    )
    with embedded(config) as (url, key):
        yield url, key, data


def processes(url: str, key: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/api/v1/admin/processes", headers={"X-API-Key": key}, timeout=60).json()
    return answer["base_models"][0]["processes"]


def train(url: str, key: str, data: Path, meanwhile: Callable[[], None] = lambda: None) -> Outcome:
    """Train and sample; returns losses, samples and the files of the checkpoint. `meanwhile` is called in each step
    while its requests run."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client("toy", rank=4, seed=1).result(timeout=600)
    adam = types.AdamParams(learning_rate=1e-2)
    losses, samples = [], []
    for step in range(STEPS):
        passed = training.forward_backward([datum(row) for row in ROWS], "cross_entropy")
        stepped = training.optim_step(adam)
        meanwhile()
        losses.append(passed.result(timeout=600).metrics["loss:sum"])
        stepped.result(timeout=600)
        if step % 4 == 3:
            sampler = training.save_weights_and_get_sampling_client().result(timeout=600)
            answer = sampler.sample(
                types.ModelInput.from_ints([5, 6, 7]), 2, types.SamplingParams(max_tokens=6, seed=3)
            ).result(timeout=600)
            samples += [list(sequence.tokens) for sequence in answer.sequences]
    path = training.save_state("final").result(timeout=600).path
    folder = max((data / "checkpoints").rglob("optimizer.safetensors"), key=lambda file: file.stat().st_mtime).parent
    assert path
    return losses, samples, {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def datum(row: list[int]) -> types.Datum:
    inputs = {
        "target_tokens": types.TensorData(data=row[1:], dtype="int64", shape=[len(row) - 1]),
        "weights": types.TensorData(data=[1.0] * (len(row) - 1), dtype="float32", shape=[len(row) - 1]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)


class Killer:
    """Kills each process of a service once, one with each call."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key
        self._left = [each["name"] for each in processes(url, key)]
        self.killed: list[str] = []

    def __call__(self) -> None:
        if not self._left:
            return
        name = self._left.pop(0)
        pid = 0
        while not pid:  # it may have to start again with the one that was killed before
            time.sleep(0.1)
            pid = next(each["pid"] for each in processes(self._url, self._key) if each["name"] == name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.killed.append(name)


def test_each_process_is_killed_on_this_machine(quiet: Outcome, tiny_llama: Path, tmp_path: Path) -> None:
    with served(tmp_path, tiny_llama, ClusterConfig(trainers=2, samplers=2)) as service:
        url, key, _ = service
        killer = Killer(url, key)
        outcome = train(*service, meanwhile=killer)
        assert killer.killed[:2] == ["trainer-0", "trainer-1"]
        command = [sys.executable, "-m", "tinsmith", "status", "--url", url, "--key", key]
        table = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert [line.split()[:3] for line in table[1:3]] == [["toy", "trainer-0", "up"], ["toy", "trainer-1", "up"]]
        assert len(table) == 5
    assert outcome == quiet


def test_each_process_is_killed_on_ray(
    quiet: Outcome, ray_cluster: RayCluster, tiny_llama: Path, tmp_path: Path
) -> None:
    cluster = ClusterConfig(address=ray_cluster.address, trainers=2, samplers=2)
    with served(tmp_path, tiny_llama, cluster) as service:
        url, key, _ = service
        assert len({each["machine"] for each in processes(url, key)}) == 2
        killer = Killer(url, key)
        outcome = train(*service, meanwhile=killer)
        assert killer.killed[:2] == ["trainer-0", "trainer-1"]
    assert outcome == quiet
