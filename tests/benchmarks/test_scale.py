"""The simulation of benchmarks/scale against written-out arithmetic."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scale.cell import Plan, run_plan
from benchmarks.scale.check import in_simulation
from benchmarks.scale.clock import now, simulate
from benchmarks.scale.hardware import Hardware
from benchmarks.scale.replicas import Turn, ratios
from benchmarks.scale.samplers import BlockCache
from benchmarks.scale.trainers import Rows, SimulatedTrainer
from tinsmith.engine.base import SampleRequest
from tinsmith.engine.cluster.prefixes import prompt_blocks

HARDWARE = Hardware(step_s=0.01, step_per_sequence_s=0.001, prefill_per_token_s=0.0001)


def _request(number: int, samples: int = 1, tokens: int = 10) -> SampleRequest:
    prompt = np.full(128, number, np.int32)
    return SampleRequest(request_id=str(number), prompt=prompt, num_samples=samples, max_tokens=tokens)


def test_time_of_requests_is_that_of_the_formula() -> None:
    single = in_simulation(HARDWARE, 1, [_request(1, samples=3)], computes=True)
    assert single == pytest.approx(128 * 0.0001 + 10 * (0.01 + 3 * 0.001))
    group = in_simulation(HARDWARE, 1, [_request(number) for number in range(4)], computes=True)
    assert group == pytest.approx(4 * 128 * 0.0001 + 10 * (0.01 + 4 * 0.001))
    shared = in_simulation(HARDWARE, 1, [_request(1, tokens=tokens) for tokens in (10, 20)], computes=True)
    assert shared == pytest.approx(128 * 0.0001 + 10 * 0.012 + 10 * 0.011)


def test_two_replicas_divide_the_requests() -> None:
    requests = [_request(number) for number in range(256)]  # of 64, the two shares differ by up to a sixth
    times = [in_simulation(HARDWARE, replicas, requests, computes=False) for replicas in (1, 2)]
    assert times[1] == pytest.approx(times[0] / 2, rel=0.25)  # the order of tasks in a set is chance


def test_owners_get_equal_parts_of_a_trainer() -> None:
    async def run() -> list[float]:
        trainer = SimulatedTrainer(2, replace(HARDWARE, train_pass_s=0.0, train_per_token_s=0.001))
        rows = Rows(np.full(8, 250, np.int64), np.zeros(8, np.int64))
        ends = [await trainer.train("a", "a", 1, rows)]
        tasks = [trainer.train(name, name, 2, rows) for name in ("a", "b")]
        return ends + [end - ends[0] for end in await asyncio.gather(*tasks)]

    assert simulate(run()) == pytest.approx([1.0, 2.0, 2.0])


def test_cache_drops_least_recently_used_blocks() -> None:
    cache = BlockCache(256)
    prompts = [prompt_blocks(np.full(128, number, np.int32), None) for number in range(3)]
    assert [cache.take(prompts[number]) for number in (0, 1, 0, 2, 0, 1)] == [0, 0, 128, 0, 128, 0]


def test_small_cell_uses_its_gpus_and_counts_every_second() -> None:
    outcome = run_plan(Plan(trainers=1, samplers=2, tenants=6, seconds=6.0))
    assert sum(outcome.samplers.values()) == pytest.approx(12.0, rel=0.02)
    assert sum(outcome.trainers.values()) == pytest.approx(6.0, rel=0.02)
    assert 0 < outcome.hits <= outcome.most < 1
    assert outcome.utilisation(outcome.samplers) > 0.9
    deaths = run_plan(Plan(trainers=1, samplers=2, tenants=6, seconds=6.0, sampler_deaths=(0.5,), api_cores=math.inf))
    assert deaths.samplers["death"] == pytest.approx(3.0, rel=0.1)


def test_ratios_compare_pairs() -> None:
    turns = [
        Turn(replicas=2, tokens=40, seconds=2.0, cpu_seconds=4.0),
        Turn(replicas=1, tokens=20, seconds=2.0, cpu_seconds=2.0),
    ]
    assert ratios(turns) == ([2.0], [2.0])
    assert simulate(_elapsed()) == pytest.approx(3600.0)


async def _elapsed() -> float:
    await asyncio.sleep(3600)
    return now()
