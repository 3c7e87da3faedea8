"""A real vLLM beside a trainer, on SmolLM2-135M-Instruct and the CPU. Runs in test-all only.

Needs the environment that `make vllm` creates; skipped without it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.engine.sampling.helpers import sample_request, texts, trained_logprobs
from tests.engine.vllm.real import ARGS, vllm_python
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass
from tinsmith.engine.cluster.cluster import ClusterEngine, ModelCluster
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.slots import LocalSlots
from tinsmith.engine_options import VllmConfig
from tinsmith.errors import EngineDied, Gone

pytestmark = pytest.mark.slow

PROMPT = "The quick brown fox jumps over the lazy dog. Once upon a time there was a"
TEXT = "Once upon a time there was a smith of tin. His hands know the work better than he does."
PARTS = {
    "all": LoraSpec(rank=8, seed=1),
    "head": LoraSpec(rank=8, seed=2, train_attn=False, train_mlp=False),
    "body": LoraSpec(rank=16, seed=3, train_unembed=False),
}
BOUNDS = {"float32": (5e-5, 5e-4), "bfloat16": (0.06, 0.5)}
"""Mean and largest |vLLM's - trainer's logprob|."""


@pytest.fixture(scope="module")
def python() -> Path:
    return vllm_python()


@pytest.fixture(scope="module")
def encode(smollm2: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return lambda text: tokenizer(text, add_special_tokens=False).input_ids


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def cluster(
    request: pytest.FixtureRequest, python: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory, wait: Any
) -> Iterator[ModelCluster]:
    """The processes of the base model."""
    settings = VllmConfig(python=python, rank=16, adapters=3, args=ARGS)
    config = EngineConfig(source=str(smollm2), dtype=request.param, device="cpu", sampler="vllm", vllm=settings)
    cluster = ModelCluster(config, ClusterConfig(), LocalSlots(), tmp_path_factory.mktemp("data"))
    yield cluster
    wait(cluster.close())


@pytest.fixture(scope="module")
def engine(
    cluster: ModelCluster, encode: Callable[[str], list[int]], tmp_path_factory: pytest.TempPathFactory, wait: Any
) -> Iterator[ClusterEngine]:
    """An engine with three trained models, each saved as a version of the same name."""
    engine = wait(cluster.start())
    text = np.array(encode(TEXT), np.int32)
    weights = np.ones(len(text) - 1, np.float32)
    datum = Datum(tokens=text[:-1], targets=text[1:].astype(np.int64), inputs={"weights": weights})
    for name, lora in PARTS.items():
        wait(engine.create(name, lora))
        for _ in range(3):
            wait(engine.run([Pass(model_id=name, data=(datum,), loss_fn="cross_entropy")]))
            wait(engine.step(name, AdamParams(learning_rate=3e-3)))
        wait(engine.capture(name, name))
        wait(engine.persist(name, tmp_path_factory.mktemp("versions") / name))
    wait(engine.create("untrained", LoraSpec(rank=8, seed=1)))
    yield engine
    wait(engine.close())


def test_logprobs_equal_the_trainers(engine: ClusterEngine, encode: Any, wait: Any, record_property: Any):
    """Three adapters in one batch, one of which trains the head, and the base model."""
    prompt = encode(PROMPT)

    async def together() -> dict[str | None, Any]:
        requests = [
            sample_request(prompt, version=name, num_samples=3, max_tokens=24, seed=None) for name in [*PARTS, None]
        ]
        results = await asyncio.gather(*(engine.sample(request) for request in requests))
        return {request.version: result for request, result in zip(requests, results, strict=True)}

    mean, most = BOUNDS[engine.card.dtype]
    for version, sampled in wait(together()).items():
        apart, moved = [], []
        for sequence in sampled.sequences:
            apart.append(
                np.abs(
                    sequence.logprobs - trained_logprobs(engine, wait, version or "untrained", prompt, sequence.tokens)
                )
            )
            moved.append(
                np.abs(sequence.logprobs - trained_logprobs(engine, wait, "untrained", prompt, sequence.tokens))
            )
        result = float(np.concatenate(apart).mean())
        record_property(f"mismatch {engine.card.dtype} {version}", result)
        print(f"mismatch {engine.card.dtype} {version}: mean {result:.2e}, max {np.concatenate(apart).max():.2e}")
        assert result < mean
        assert np.concatenate(apart).max() < most
        assert version is None or np.concatenate(moved).mean() > 0.1  # the adapter changes the distribution


def test_logprobs_are_tempered(engine: ClusterEngine, encode: Any, wait: Any):
    """lp(i) - lp(j) at temperature T is the difference at 1 divided by T."""
    prompt = encode(PROMPT)
    (sequence,) = wait(
        engine.sample(sample_request(prompt, version="all", temperature=0.5, topk_sample_logprobs=2, max_tokens=12))
    ).sequences
    assert sequence.topk is not None
    whole = [*prompt, *sequence.tokens]
    expected = np.full((len(whole) - 1, 2), -1, np.int64)
    expected[len(prompt) - 1 :] = sequence.topk.token_ids
    trained = wait(engine.sample(sample_request(whole, version="all", max_tokens=1, target_prompt_logprobs=expected)))
    untempered = trained.target_prompt_logprobs[len(prompt) - 1 :]
    apart = (sequence.topk.logprobs[:, 0] - sequence.topk.logprobs[:, 1]) - (untempered[:, 0] - untempered[:, 1]) / 0.5
    assert np.abs(apart).max() < (1e-2 if engine.card.dtype == "float32" else 1.0)


def test_greedy_tokens_equal_the_torch_samplers(engine: ClusterEngine, encode: Any, wait: Any):
    if engine.card.dtype != "float32":
        pytest.skip("in bfloat16 the first of two near equals is chance")
    request = sample_request(encode(PROMPT), version="all", temperature=0, num_samples=2, max_tokens=24)
    actual, expected = wait(engine.sample(request)), wait(engine.trainer.leader.sample(request))
    for sequence, right in zip(actual.sequences, expected.sequences, strict=True):
        np.testing.assert_array_equal(sequence.tokens, right.tokens)
        np.testing.assert_allclose(sequence.logprobs, right.logprobs, atol=2e-3)


def test_seed_repeats_and_samples_differ(engine: ClusterEngine, encode: Any, wait: Any):
    request = sample_request(encode("1, 7,"), num_samples=3, seed=5)
    sequence, right = wait(engine.sample(request)), wait(engine.sample(request))
    assert [a.tokens.tolist() for a in sequence.sequences] == [b.tokens.tolist() for b in right.sequences]
    assert len({tuple(a.tokens.tolist()) for a in sequence.sequences}) == 3


def test_stops_are_included_and_default_to_the_models(engine: ClusterEngine, encode: Any, wait: Any, smollm2: Path):
    prompt = encode(PROMPT)
    greedy = wait(engine.sample(sample_request(prompt, temperature=0, max_tokens=40))).sequences[0].tokens.tolist()
    (sequence,) = wait(
        engine.sample(sample_request(prompt, temperature=0, max_tokens=40, stop_tokens=(greedy[7],)))
    ).sequences
    assert (sequence.stop_reason, sequence.tokens.tolist()) == ("stop", greedy[: greedy.index(greedy[7]) + 1])
    whole = texts(smollm2, wait(engine.sample(sample_request(prompt, temperature=0, max_tokens=40))))[0]
    word = whole.split()[6]
    sampled = wait(engine.sample(sample_request(prompt, temperature=0, max_tokens=40, stop_strings=(word,))))
    assert sampled.sequences[0].stop_reason == "stop"
    assert texts(smollm2, sampled)[0] == whole[: whole.index(word) + len(word)]
    question = encode("<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n")
    (ended,) = wait(engine.sample(sample_request(question, temperature=0, max_tokens=200, stop_tokens=None))).sequences
    assert (ended.stop_reason, ended.tokens[-1]) == ("stop", engine.card.eos_token_ids[0])
    (on,) = wait(engine.sample(sample_request(question, temperature=0, max_tokens=len(ended.tokens) + 5))).sequences
    assert (on.stop_reason, len(on.tokens)) == ("length", len(ended.tokens) + 5)


def vllm_of(cluster: ModelCluster) -> psutil.Process:
    """The process of vLLM."""
    assert cluster.pool is not None
    children = psutil.Process(cluster.pool.status()[0].pid).children()
    return next(child for child in children if "--port" in child.cmdline())


def test_cancelled_request_stops_in_vllm(cluster: ModelCluster, engine: ClusterEngine, encode: Any, wait: Any):
    async def running() -> float:
        command = vllm_of(cluster).cmdline()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{command[command.index('--port') + 1]}") as client:
            lines = (await client.get("/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    async def cancel() -> None:
        request = sample_request(encode(PROMPT), max_tokens=4000)
        deltas: list[Any] = []
        waiting = asyncio.create_task(engine.sample(request, deltas.append))
        for _ in range(600):
            await asyncio.sleep(0.1)
            if len(deltas) > 3:
                break
        assert await running() == 1
        await engine.cancel(request.request_id)
        with pytest.raises(Gone):
            await waiting
        for _ in range(100):
            await asyncio.sleep(0.1)
            if await running() == 0:
                return
        raise AssertionError("vLLM goes on")

    wait(cancel())


def test_restarted_vllm_has_the_versions(cluster: ModelCluster, engine: ClusterEngine, encode: Any, wait: Any):
    if engine.card.dtype != "bfloat16":
        pytest.skip("once is enough: it takes a minute")
    request = sample_request(encode(PROMPT), version="all", temperature=0)
    before = wait(engine.sample(request)).sequences[0].tokens.tolist()

    async def death() -> None:
        has_begun = asyncio.Event()
        long = sample_request(encode(PROMPT), max_tokens=4000)
        waiting = asyncio.create_task(engine.sample(long, lambda _: has_begun.set()))
        await has_begun.wait()
        vllm_of(cluster).kill()
        with pytest.raises(EngineDied):
            await waiting

    wait(death())
    assert wait(engine.sample(request)).sequences[0].tokens.tolist() == before


def test_vllm_ends_with_its_parent(python: Path, smollm2: Path, tmp_path: Path):
    program = (
        "import asyncio, sys; from pathlib import Path; from tinsmith.engine.base import ModelCard;"
        "from tinsmith.engine_options import VllmConfig; from tinsmith.engine.vllm.server import VllmServer;"
        f"card = ModelCard(source='m', tokenizer={str(smollm2)!r}, arch='llama', vocab_size=49152, context_length=256,"
        "eos_token_ids=(2,), dtype='bfloat16', device='cpu');"
        f"server = VllmServer(VllmConfig(python={str(python)!r}), card, 1, Path({str(tmp_path)!r}));"
        "asyncio.run(server.start())"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 120
    while len(children := psutil.Process(parent.pid).children(recursive=True)) < 2:  # vLLM and its engine process
        assert time.monotonic() < deadline
        time.sleep(0.2)
    parent.kill()
    parent.wait()
    for _ in range(300):
        alive = [
            sequence for sequence in children if sequence.is_running() and sequence.status() != psutil.STATUS_ZOMBIE
        ]
        if not alive:
            return
        time.sleep(0.2)
    for sequence in alive:
        sequence.kill()
    raise AssertionError(f"{alive} outlived the process that started them")
