"""An engine gives back the memory that it keeps for speed only, and computes the same afterwards."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.sampling.helpers import assert_same_samples, sample_request
from tinsmith.engine.base import SampleRequest, SampleResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.client import start_local

PROMPTS, TOKENS = 200, 240
REQUESTS, CLIENTS, CACHE_TOKENS = 60, 6, 32_768
TOKEN_NUMBERS = 30 * 2 * 3 * 64
"""Of a token of SmolLM2 in the cache: layers, keys and values, heads, their width."""
MIB = 2**20


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    fields = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024


async def sampled(engine: Any, requests: Sequence[SampleRequest]) -> list[SampleResult]:
    return await gather(*map(engine.sample, requests))


def test_caches_are_given_back(tiny_llama: Path, wait: Any) -> None:
    """To break it: leave out `shrink` or `trim` in `TorchEngine.release_memory`."""
    config = EngineConfig(
        source=str(tiny_llama), dtype="float32", device="cpu", threads=1, pass_tokens=2048, cache_tokens=2**20
    )
    engine = wait(start_local(config))
    try:
        random = np.random.default_rng(0)
        prompts = random.integers(3, 90, (PROMPTS, TOKENS), np.int32)

        def requests() -> list[Any]:
            return [sample_request(prompt=prompt, max_tokens=2, seed=1) for prompt in prompts]

        wait(engine.release_memory())
        empty = resident_bytes(engine.pid)
        first = wait(sampled(engine, requests()))
        full = resident_bytes(engine.pid)
        assert wait(engine.sample(requests()[0])).prompt_cache_hit_tokens > 0
        wait(engine.release_memory())
        released = resident_bytes(engine.pid)
        print(f"{empty / MIB:.0f} MiB empty, {full / MIB:.0f} with caches, {released / MIB:.0f} after the release")
        assert full - empty > 20 * MIB
        assert released - empty < (full - empty) / 2
        again = wait(engine.sample(requests()[0]))
        assert again.prompt_cache_hit_tokens == 0
        assert_same_samples(again, first[0])
    finally:
        wait(engine.close())


@pytest.mark.slow
def test_samples_of_every_length_leave_no_holes(smollm2: Path, wait: Any) -> None:
    """An engine that samples grows by no more than twice what its cache holds: by 987 MiB, with 720 in the cache.

    To break it: have all tensors come from the heap (`M_MMAP_MAX` 0), where rows and prefixes of every size leave
    holes: 1,743 MiB.
    """
    engine = wait(start_local(EngineConfig(source=str(smollm2), device="cpu", cache_tokens=CACHE_TOKENS)))
    try:
        draw = np.random.default_rng(0)
        requests = [
            sample_request(prompt=draw.integers(20, 49_000, length), max_tokens=most, num_samples=count)
            for length, most, count in zip(
                draw.integers(4, 1500, REQUESTS).tolist(),
                draw.choice([1, 8, 32, 64], REQUESTS).tolist(),
                draw.choice([1, 1, 2, 8, 16], REQUESTS).tolist(),
                strict=True,
            )
        ]
        loaded, levels, waiting = resident_bytes(engine.pid), list[int](), iter(requests)

        async def client() -> None:
            for request in waiting:
                await engine.sample(request)
                levels.append(resident_bytes(engine.pid))

        async def clients() -> None:
            await gather(*(client() for _ in range(CLIENTS)))

        wait(clients())
        token_bytes = TOKEN_NUMBERS * torch.finfo(getattr(torch, engine.card.dtype)).bits // 8
        grown = max(levels) - loaded
        print(f"{grown / MIB:.0f} MiB above the loaded model; its cache holds {CACHE_TOKENS * token_bytes / MIB:.0f}")
        assert grown < 2 * CACHE_TOKENS * token_bytes
    finally:
        wait(engine.close())


def test_memory_of_any_gpu_is_given_back(engine: Any, wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cuda:0"))
    monkeypatch.setattr(engine, "_base", SimpleNamespace(device=torch.device("cuda:0"), vision=None))
    wait(engine.release_memory())
    assert emptied
