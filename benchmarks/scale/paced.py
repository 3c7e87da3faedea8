"""A sampler process that decodes by sleeping, for `benchmarks.scale.check`: the program of a slot."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from benchmarks.scale.hardware import Hardware
from benchmarks.scale.samplers import BlockCache
from tinsmith.engine.base import ModelCard, OnDelta, SampledSequence, SampleRequest, SampleResult
from tinsmith.engine.cluster.prefixes import prompt_blocks
from tinsmith.engine.processes.worker import ParentLink, answer_calls, open_link

PACED = Hardware(
    step_s=0.03, step_per_sequence_s=0.001, prefill_per_token_s=0.000_2, cache_tokens=6000, load_s=0.0, notice_s=0.0
)
"""A step takes 30 to 60 ms, so that sleeping is exact enough."""
CARD = ModelCard(
    source="paced", tokenizer="paced", arch="none", vocab_size=50_000, context_length=8192, eos_token_ids=(2,),
    dtype="float32", device="cpu",
)  # fmt: skip


@dataclass(eq=False, slots=True)
class _Running:
    left: list[int]
    """Tokens of each unfinished answer."""
    done: asyncio.Future[None]


class PacedSampler:
    """Decodes by sleeping: one sleep for a step of all running sequences, and one for a prefill."""

    def __init__(self, hardware: Hardware) -> None:
        self.progress = 0
        self._hardware = hardware
        self._cache = BlockCache(hardware.cache_tokens)
        self._waiting: list[tuple[SampleRequest, asyncio.Future[None]]] = []
        self._running: list[_Running] = []
        self._loop: asyncio.Task[None] | None = None

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, done))
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._decode())
        await done
        lengths = lengths_of(request)
        empty = np.empty(0, np.float32)
        return SampleResult(
            sequences=tuple(
                SampledSequence(tokens=np.zeros(length, np.int32), logprobs=empty, stop_reason="stop")
                for length in lengths
            )
        )

    async def cancel(self, request_id: str) -> None:
        """Nobody cancels."""

    async def release_memory(self) -> None:
        """Nothing is kept."""

    async def _decode(self) -> None:
        while self._waiting or self._running:
            waiting, self._waiting = self._waiting, []
            for request, done in waiting:
                hit = self._cache.take(prompt_blocks(request.prompt, (request.version, request.cache_scope)))
                await asyncio.sleep((len(request.prompt) - hit) * self._hardware.prefill_per_token_s)
                self._running.append(_Running(lengths_of(request), done))
            await asyncio.sleep(self._hardware.decode_step(sum(len(each.left) for each in self._running)))
            self.progress += 1
            for each in self._running:
                each.left = [left - 1 for left in each.left if left > 1]
                if not each.left:
                    each.done.set_result(None)
            self._running = [each for each in self._running if each.left]


def lengths_of(request: SampleRequest) -> list[int]:
    """Tokens of each answer, fixed by the seed of the request."""
    rng = np.random.default_rng(request.seed)
    mean = (request.max_tokens or 1) / 2
    return [int(each) for each in np.clip(rng.lognormal(np.log(mean), 0.4, request.num_samples), 1, request.max_tokens)]


async def _serve(link: ParentLink) -> None:
    hardware = link.receive()
    link.send(CARD)
    await answer_calls(PacedSampler(hardware), link)


def main() -> None:
    """Entry point of the process."""
    link, _ = open_link()
    asyncio.run(_serve(link))


if __name__ == "__main__":
    main()
