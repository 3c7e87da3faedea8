"""Real vLLM servers as sampling processes, on SmolLM2 and the CPU, used through the unmodified SDK.

The SDK trains, publishes versions and samples while the processes of a replica are killed and stopped. Needs the
environment that `make vllm` creates; skipped without it.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from tests.engine.vllm.real import ARGS, vllm_python
from tests.service.conftest import datum
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine_options import VllmConfig
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROWS = [[3 + (11 * row + 5 * token) % 400 for token in range(12 + 9 * row)] for row in range(4)]
PROMPTS = [[(row + 1) * (token + 7) % 997 + 3 for token in range(200)] for row in range(6)]
"""Of more tokens than a block of vLLM's cache (128 on a CPU) and of the table of prefixes."""
TOKENS = 64
"""Of a sample that is running when something ends."""
MEAN, MOST = 5e-5, 5e-4
"""Mean and largest |vLLM's - trainer's logprob| in float32."""
STALL_S = 40.0
WAIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Replica:
    """A sampling process and the vLLM that it has started."""

    worker: psutil.Process
    server: psutil.Process
    starts: int
    versions: int

    @property
    def engine(self) -> psutil.Process:
        """The process that computes."""
        return next(child for child in self.server.children() if "EngineCore" in " ".join(child.cmdline()))

    def metric(self, name: str) -> float:
        """Sum of one of vLLM's metrics."""
        command = self.server.cmdline()
        text = httpx.get(f"http://127.0.0.1:{command[command.index('--port') + 1]}/metrics", timeout=60).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))


@dataclass(frozen=True, slots=True)
class Served:
    """A service with two replicas, and a client that trains."""

    url: str
    key: str
    training: tinker.TrainingClient

    def processes(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/api/v1/admin/processes", headers={"X-API-Key": self.key}, timeout=60).json()
        return [each for each in answer["base_models"][0]["processes"] if each["role"] == "sampler"]

    def replicas(self) -> list[Replica]:
        """Those that are up."""
        return [_replica(each) for each in self.processes() if each["is_up"]]

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", headers={"X-API-Key": self.key}, timeout=60).text
        return sum(float(number) for number in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def published(self, learning_rate: float) -> tinker.SamplingClient:
        """Train a step; returns a client of the new version."""
        passed = self.training.forward_backward([datum(row) for row in ROWS], "cross_entropy")
        self.training.optim_step(types.AdamParams(learning_rate=learning_rate)).result(timeout=WAIT_S)
        passed.result(timeout=WAIT_S)
        return self.training.save_weights_and_get_sampling_client().result(timeout=WAIT_S)

    def mismatch(self, prompt: Sequence[int], sequence: types.SampledSequence) -> np.ndarray:
        """|vLLM's - trainer's logprob| of the sampled tokens, under the weights of now."""
        whole = [*prompt, *sequence.tokens]
        passed = self.training.forward([datum(whole)], "cross_entropy").result(timeout=WAIT_S)
        trained = np.asarray(passed.loss_fn_outputs[0]["logprobs"].data)[len(prompt) - 1 :]
        return np.abs(trained - np.asarray(sequence.logprobs))


def _replica(status: dict[str, Any]) -> Replica:
    worker = psutil.Process(status["pid"])
    (server,) = (child for child in worker.children() if "--port" in child.cmdline())
    return Replica(worker, server, status["generation"], status["versions"])


@contextmanager
def served(smollm2: Path, data: Path, cluster: ClusterConfig) -> Iterator[Served]:
    settings = VllmConfig(python=vllm_python(), rank=8, adapters=2, args=ARGS)
    config = ServeConfig(
        models=(f"smollm2={smollm2}",),
        data=data,
        dtype="float32",
        device="cpu",
        threads=1,
        sampler="vllm",
        vllm=settings,
        cluster=cluster,
        engine_timeout_s=STALL_S,
    )
    with embedded(config) as (url, key):
        client = tinker.ServiceClient(base_url=url, api_key=key)
        yield Served(url, key, client.create_lora_training_client("smollm2", rank=8, seed=1).result(timeout=WAIT_S))
        client.close("success").result()


@pytest.fixture(scope="module")
def service(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(smollm2, tmp_path_factory.mktemp("data"), ClusterConfig(samplers=2)) as running:
        yield running


def sample(
    client: tinker.SamplingClient, prompts: Sequence[Sequence[int]], tokens: int
) -> list[list[types.SampledSequence]]:
    """Two samples of each prompt, all at once."""
    settings = types.SamplingParams(max_tokens=tokens, stop=[])
    futures = [client.sample(types.ModelInput.from_ints(list(prompt)), 2, settings) for prompt in prompts]
    return [list(future.result(timeout=WAIT_S).sequences) for future in futures]


def assert_trainers_logprobs(service: Served, answers: Sequence[Sequence[types.SampledSequence]]) -> None:
    apart = np.concatenate(
        [
            service.mismatch(prompt, sequence)
            for prompt, sequences in zip(PROMPTS, answers, strict=False)
            for sequence in sequences
        ]
    )
    print(f"mismatch of {len(apart)} logprobs: mean {apart.mean():.2e}, max {apart.max():.2e}")
    assert apart.mean() < MEAN
    assert apart.max() < MOST


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_both_replicas_sample_each_version(service: Served):
    before = {each.server.pid: each.metric("generation_tokens_total") for each in service.replicas()}
    for learning_rate in (1e-2, 2e-3):
        client = service.published(learning_rate)
        answers = sample(client, PROMPTS, 16)
        assert_trainers_logprobs(service, answers)
    grown = [each.metric("generation_tokens_total") - before[each.server.pid] for each in service.replicas()]
    print("tokens of each replica:", grown)
    assert len(grown) == 2
    assert min(grown) > 0
    assert sum(grown) == 2 * 2 * 16 * len(PROMPTS)


def test_a_prompt_returns_to_the_replica_that_has_it(service: Served):
    """One prompt after another, so that neither replica is busy: all whole blocks of every prompt are cached there."""
    client = service.published(1e-3)
    sample(client, PROMPTS, 2)
    routed = service.metric("tinsmith_samples_routed_by_prefix_total")
    cached = sum(each.metric("prefix_cache_hits_total") for each in service.replicas())
    for prompt in PROMPTS:
        sample(client, [prompt], 2)
    assert service.metric("tinsmith_samples_routed_by_prefix_total") - routed == len(PROMPTS)
    cached = sum(each.metric("prefix_cache_hits_total") for each in service.replicas()) - cached
    print(f"cached tokens: {cached}")
    assert cached >= 128 * len(PROMPTS)


FAULTS: dict[str, Callable[[Replica], None]] = {
    "replica killed": lambda replica: replica.worker.send_signal(signal.SIGKILL),
    "vLLM killed": lambda replica: replica.server.send_signal(signal.SIGKILL),
    "vLLM's engine killed": lambda replica: replica.engine.send_signal(signal.SIGKILL),
    "replica stopped": lambda replica: replica.worker.send_signal(signal.SIGSTOP),
    "vLLM stopped": lambda replica: replica.server.send_signal(signal.SIGSTOP),
    "vLLM's engine stopped": lambda replica: replica.engine.send_signal(signal.SIGSTOP),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_of_a_replica_that_ends_are_answered(service: Served, fault: str):
    """Every request is answered, nothing of the replica is left, it is back, and it has the version again."""
    until(lambda: len(service.replicas()) == 2)
    client = service.published(1e-3)
    sample(client, PROMPTS[:4], 2)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sample, client, PROMPTS, TOKENS)
        until(lambda: all(each["running"] for each in service.processes()))
        victim = service.replicas()[0]
        left = [victim.worker, *victim.worker.children(recursive=True)]
        start = time.monotonic()
        FAULTS[fault](victim)
        answers = running.result(timeout=WAIT_S)
    print(f"{fault}: answered after {time.monotonic() - start:.0f} s", end="; ")
    assert [len(sequence.tokens) for sequences in answers for sequence in sequences] == [TOKENS] * 2 * len(PROMPTS)
    assert_trainers_logprobs(service, answers)
    until(lambda: any(each.starts > victim.starts for each in service.replicas()) and len(service.replicas()) == 2)
    print(f"{fault}: back after {time.monotonic() - start:.0f} s")
    until(lambda: not any(_runs(process) for process in left))
    # Other prompts than before, which go to the less loaded replica: both are used.
    prompts = [[token + 1 for token in prompt] for prompt in PROMPTS]
    sample(client, prompts, 8)
    back = next(each for each in service.replicas() if each.starts > victim.starts)
    assert back.versions >= 1
    assert back.metric("generation_tokens_total") > 0


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_sharded_trainers_give_vllm_their_versions(smollm2: Path, tmp_path: Path):
    """FSDP2 over two ranks. What vLLM does not compute is refused, since the ranks do not sample."""
    with served(smollm2, tmp_path, ClusterConfig(trainers=2, shard=True, samplers=1)) as sharded:
        for learning_rate in (1e-2, 2e-3):
            client = sharded.published(learning_rate)
            answers = sample(client, PROMPTS[:3], 16)
            assert_trainers_logprobs(sharded, answers)
        prompt = types.ModelInput.from_ints(PROMPTS[0])
        with pytest.raises(tinker.RequestFailedError, match=r"not sampled from there.*without top_k"):
            client.sample(prompt, 1, types.SamplingParams(max_tokens=2, top_k=5)).result(timeout=WAIT_S)
