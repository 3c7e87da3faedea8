"""The watch over a real vLLM: a long prefill counts as progress, and a process of vLLM that is stopped is found.

On SmolLM2-135M-Instruct and the CPU. Needs the environment that `make vllm` creates; skipped without it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engine.reference import write_adapter
from tests.engine.sampling.helpers import sample_request
from tests.engine.vllm.real import ARGS, vllm_python
from tinsmith.engine.base import LoraSpec, ModelCard
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.vllm.sampler import VllmSampler
from tinsmith.engine_options import VllmConfig
from tinsmith.errors import EngineDied

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TIMEOUT_S = 20.0
STALLED = "stalled: requests run, and vLLM's engine makes no step, for 20 s"
LONG = 3000
"""Tokens of a prompt."""


@asynccontextmanager
async def sampler_of(smollm2: Path, folder: Path) -> AsyncIterator[VllmSampler]:
    """A vLLM with version "v"."""
    settings = VllmConfig(python=vllm_python(), rank=8, adapters=1, args=(*ARGS, "--max-num-seqs", "8"))
    config = EngineConfig(
        source=str(smollm2), dtype="float32", device="cpu", threads=1, vllm=settings, engine_timeout_s=TIMEOUT_S
    )
    card = ModelCard(
        source=str(smollm2), tokenizer=str(smollm2), arch="llama", vocab_size=49152, context_length=8192,
        eos_token_ids=(2,), dtype="float32", device="cpu",
    )  # fmt: skip
    sampler = VllmSampler(config, card)
    try:
        await sampler.server.start()
        await sampler.attach("v", write_adapter(smollm2, folder / "adapter", LoraSpec(rank=4, seed=1)))
        await sampler.sample(sample_request([5, 6, 7], version="v", max_tokens=2))
        yield sampler
    finally:
        await sampler.close()


def process(sampler: VllmSampler, name: str) -> psutil.Process:
    """A process of vLLM by the name that it gives itself."""
    children = psutil.Process(sampler.server.pid).children(recursive=True)
    return next(child for child in children if name in " ".join(child.cmdline()))


async def running(sampler: VllmSampler) -> float:
    """How many requests vLLM says it runs."""
    async with httpx.AsyncClient(base_url=sampler.server.url) as client:
        lines = (await client.get("/metrics", timeout=60)).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def test_long_prefill_is_progress(smollm2: Path, tmp_path: Path):
    """Each prompt is one step, as the samples have seeds. To break it: leave out `is_busy` in
    `VllmServer._check_health`, or let vLLM compute prompts in parts. Where it takes longer than 300 s, leave out
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS."""

    async def main() -> None:
        async with sampler_of(smollm2, tmp_path) as sampler:
            start = time.monotonic()
            prompts = [[(token * (number + 3)) % 9973 + 3 for token in range(LONG)] for number in range(2)]
            requests = [sample_request(prompt, version="v", max_tokens=1) for prompt in prompts]
            results = await asyncio.gather(*(sampler.sample(request) for request in requests))
            seconds = time.monotonic() - start
            print(f"prefill of {len(prompts)} x {LONG} tokens: {seconds:.0f} s")
            assert [len(result.sequences[0].tokens) for result in results] == [1, 1]
            assert seconds > 1.5 * TIMEOUT_S, "too fast to show anything: raise LONG"
            assert not sampler.server.ended.is_set()

    asyncio.run(main())


@pytest.mark.parametrize(("name", "is_idle"), [("EngineCore", True), ("EngineCore", False), ("Worker", False)], ids=str)
def test_stopped_engine_is_killed(name: str, is_idle: bool, smollm2: Path, tmp_path: Path):
    """/health answers 200 all the time. An engine that stops while it is idle never counts the request that comes."""

    async def main() -> None:
        async with sampler_of(smollm2, tmp_path) as sampler:
            request = sample_request([5, 6, 7], version="v", max_tokens=16 if is_idle else 4000)
            if is_idle:
                process(sampler, name).send_signal(signal.SIGSTOP)
            waiting = asyncio.create_task(sampler.sample(request))
            if is_idle:
                await asyncio.sleep(3)
                assert await running(sampler) == 0
            else:
                for _ in range(600):
                    await asyncio.sleep(0.1)
                    if await running(sampler) == 1:
                        break
                process(sampler, name).send_signal(signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(EngineDied, match=STALLED):
                await waiting
            print(f"found after {time.monotonic() - start:.0f} s")
            assert sampler.server.ended.is_set()

    asyncio.run(main())
