"""The simulation against real processes: `python -m benchmarks.scale.check`.

The replicas are processes of their own that decode by sleeping, step by step, for as long as the arithmetic of the
simulation says; the pool, the slots, the connections and the admission queue are those of the service. The same
requests then run in simulated time. What differs is the simulation's error: it knows no Link, no event loop, no steps.

`--torch` does the same with engines that compute, fitted to one of them right before each run. Other programs use the
same cores, so there the mean CPU time of the processes is compared with the mean time in which a replica computes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil

from benchmarks.scale.clock import now, simulate
from benchmarks.scale.hardware import Hardware
from benchmarks.scale.paced import PACED, lengths_of
from benchmarks.scale.replicas import cpu_seconds
from benchmarks.scale.samplers import PromptCounts, SimulatedSlots
from tinsmith.engine.base import SampleRequest
from tinsmith.engine.cluster.launches import torch_in_slot, watched
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.engine.cluster.replica import Launch, SamplerProcess
from tinsmith.engine.config import EngineConfig, converted_default
from tinsmith.engine.processes.client import start_engine
from tinsmith.engine.processes.slots import LocalSlots, Program
from tinsmith.service.engines.admission import AdmissionQueue

CACHE_TOKENS = 6000
"""Of each replica that computes."""


def _full_lengths(request: SampleRequest) -> list[int]:
    """Of engines that compute: they stop at nothing but the limit."""
    return [request.max_tokens or 1] * request.num_samples


def requests_of(count: int, tokens: int, seed: int) -> list[SampleRequest]:
    """Requests of groups of two under prompts of 64 to 256 tokens, each prompt four times."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(5, 40_000, rng.integers(64, 256)).astype(np.int32) for _ in range(-(-count // 4))]
    return [
        SampleRequest(
            request_id=str(number), prompt=prompts[number // 4], num_samples=2, max_tokens=tokens, seed=seed + number,
            stop_tokens=(),
        )
        for number in range(count)
    ]  # fmt: skip


async def timed(pool: SamplerPool, requests: Sequence[SampleRequest], cache_tokens: int) -> float:
    """Seconds until all requests are done: eight clients for each replica, each with one request at a time."""
    queue = AdmissionQueue(cache_tokens)
    queue.resize(pool.living)
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            async with queue.admit("tenant", request):
                await pool.sample(request)

    start = now()
    await asyncio.gather(*(client() for _ in range(8 * pool.living)))
    return now() - start


def in_simulation(hardware: Hardware, replicas: int, requests: Sequence[SampleRequest], *, computes: bool) -> float:
    """The same in simulated time; of engines that compute, the mean time in which they do."""

    async def run() -> float:
        slots = SimulatedSlots(replicas, hardware, _full_lengths if computes else lengths_of, PromptCounts())
        pool = await SamplerPool.start(slots.launches())
        seconds = await timed(pool, requests, hardware.cache_tokens)
        if computes:
            seconds = statistics.fmean(each.busy_s for each in slots.current if each is not None)
        await pool.close()
        return seconds

    return simulate(run())


async def in_processes(launches: Sequence[Launch], runs: Sequence[Sequence[SampleRequest]], cache: int) -> list[float]:
    """In real processes, one time for each run. The first request of each process does not count."""
    pool = await SamplerPool.start(launches)
    await asyncio.gather(*(pool.sample(replace(each, max_tokens=2)) for each in requests_of(8, 2, seed=999)))
    seconds = [await timed(pool, requests, cache) for requests in runs]
    await pool.close()
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Seconds in processes and in the simulation.

    Example: Comparison(engine="sleeps", replicas=2, real=[12.1], simulated=[11.8])
    """

    engine: str
    replicas: int
    real: list[float]
    simulated: list[float]

    @property
    def error(self) -> float:
        """Of the simulation, as a share of the real time: the median of the runs."""
        return statistics.median(
            abs(simulated / real - 1) for real, simulated in zip(self.real, self.simulated, strict=True)
        )


async def compare_paced(counts: Sequence[int], runs: int) -> list[Comparison]:
    """Sleeping engines at each count of replicas."""
    local = LocalSlots()
    slots = await local.reserve(max(counts), name="sampler")
    generations = itertools.count(1)

    def launch_in(index: int) -> Launch:
        async def launch() -> SamplerProcess:
            program = Program(module="benchmarks.scale.paced")
            engine = await start_engine(slots[index], PACED, "paced", next(generations), program)
            return watched(engine, 600, "sampler")

        return launch

    results = []
    for count in counts:
        loads = [requests_of(40 * count, 24, seed=100 * run) for run in range(runs)]
        real = await in_processes([launch_in(index) for index in range(count)], loads, PACED.cache_tokens)
        simulated = [await asyncio.to_thread(in_simulation, PACED, count, load, computes=False) for load in loads]
        results.append(Comparison(engine="sleeps", replicas=count, real=real, simulated=simulated))
    await local.close()
    return results


async def compare_torch(counts: Sequence[int], runs: int, model: str) -> list[Comparison]:
    """Torch engines of one thread each. The arithmetic is fitted to one process in runs of the same session."""
    config = EngineConfig(source=model, dtype="float32", device="cpu", threads=1, cache_tokens=CACHE_TOKENS)
    local = LocalSlots()
    slots = await local.reserve(max(counts) + 1, name="sampler")
    launches = [torch_in_slot(slot, config) for slot in slots]
    single = await SamplerPool.start(launches[:1])
    results = []
    for count in counts:
        pool = await SamplerPool.start(launches[1 : count + 1])
        processes = [psutil.Process(each.pid) for each in pool.status()]
        await asyncio.gather(*map(pool.sample, requests_of(8 * count, 3, seed=999)))
        real, simulated = [], []
        for run in range(runs):
            hardware = await _fitted(single, CACHE_TOKENS)
            load = requests_of(16 * count, 16, seed=100 * run)
            before = cpu_seconds(processes)
            await timed(pool, load, CACHE_TOKENS)
            real.append((cpu_seconds(processes) - before) / count)
            simulated.append(await asyncio.to_thread(in_simulation, hardware, count, load, computes=True))
        results.append(Comparison(engine="torch", replicas=count, real=real, simulated=simulated))
        await pool.close()
    await single.close()
    await local.close()
    return results


async def _fitted(pool: SamplerPool, cache_tokens: int) -> Hardware:
    """CPU time of a step and of a prefill, from requests of several sizes on a pool of one."""
    rng = np.random.default_rng()
    processes = [psutil.Process(each.pid) for each in pool.status()]

    async def seconds(prompt: int, samples: int, tokens: int) -> float:
        prompts = rng.integers(5, 40_000, (samples, prompt)).astype(np.int32)
        requests = [
            SampleRequest(request_id=f"fit{index}", prompt=each, num_samples=2, max_tokens=tokens, stop_tokens=())
            for index, each in enumerate(prompts)
        ]
        start = cpu_seconds(processes)
        for _ in range(2):
            await asyncio.gather(*map(pool.sample, requests))
            requests = [replace(each, prompt=np.flip(each.prompt)) for each in requests]
        return (cpu_seconds(processes) - start) / 2

    few = (await seconds(64, 1, 25) - await seconds(64, 1, 1)) / 24
    many = (await seconds(64, 8, 25) - await seconds(64, 8, 1)) / 24
    prefill = (await seconds(256, 2, 1) - await seconds(64, 2, 1)) / 2 / 192
    per_sequence = max(0.0, (many - few) / 14)
    return Hardware(
        step_s=few - 2 * per_sequence,
        step_per_sequence_s=per_sequence,
        prefill_per_token_s=prefill,
        cache_tokens=cache_tokens,
        load_s=0.0,
        notice_s=0.0,
    )


def main() -> None:
    """Compare and write, or be a process of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scale-check.json"))
    args = parser.parse_args()
    comparing = (
        compare_torch(args.counts, args.runs, str(converted_default()))
        if args.torch
        else compare_paced(args.counts, args.runs)
    )
    results = asyncio.run(comparing)
    lines = json.loads(args.out.read_text()) if args.out.is_file() else []
    engine = results[0].engine
    lines = [line for line in lines if line["engine"] != engine]
    for each in results:
        print(
            engine, each.replicas, [f"{value:.2f}" for value in each.real], [f"{value:.2f}" for value in each.simulated]
        )
        lines.append(
            {
                "engine": engine, "replicas": each.replicas, "real_s": each.real, "simulated_s": each.simulated,
                "error": each.error,
            }
        )  # fmt: skip
    args.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
