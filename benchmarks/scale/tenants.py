"""Tenants: groups of answers trained with GRPO, agents of many turns, and small supervised runs, each in a loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from benchmarks.scale.clock import now
from benchmarks.scale.trainers import Rows
from tinsmith.engine.base import SampleRequest

Kind = Literal["groups", "agents", "supervised"]
KINDS: tuple[Kind, ...] = ("groups", "agents", "supervised")
GROUP = 8
ANSWER_TOKENS, ANSWER_SIGMA = 300, 0.6
TURN_TOKENS = 150
TOOL_TOKENS = 100
SYSTEM_TOKENS = 400
MAX_TOKENS = 2048


def answer_lengths(request: SampleRequest) -> list[int]:
    """Tokens of each answer: lognormal, fixed by the seed of the request."""
    rng = np.random.default_rng(request.seed)
    mean = request.top_k  # the tenants' field for the mean: the simulated engine has no other use for it
    lengths = rng.lognormal(np.log(mean) - ANSWER_SIGMA**2 / 2, ANSWER_SIGMA, request.num_samples)
    return [int(length) for length in np.clip(lengths, 1, request.max_tokens)]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant that is active. `size`: of its batches, 1 for the smallest."""

    name: str
    kind: Kind
    size: int
    seed: int


@dataclass(slots=True)
class Record:
    """What a tenant has seen."""

    waits: list[float] = field(default_factory=list)
    """Seconds until a sample began to decode."""
    pass_waits: list[float] = field(default_factory=list)
    """Seconds that a pass took more than alone."""
    batches: int = 0
    busy_s: float = 0.0
    """Time of whole batches."""
    ideal_s: float = 0.0
    """The time that they would take on an idle cell of the same size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What tenants call: the cell."""

    sample: Callable[[Tenant, SampleRequest], Awaitable[list[int]]]
    train: Callable[[Tenant, int, Rows], Awaitable[None]]
    step: Callable[[Tenant, int], Awaitable[None]]
    publish: Callable[[Tenant, int], Awaitable[str]]


def active_tenants(count: int, seed: int) -> list[Tenant]:
    """Active tenants, a third of each kind. Their sizes follow Zipf's law over the rank of a tenant, from 1 to 32."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(count)
    sizes = [int(np.clip(32 / (1 + rank * 32 / count), 1, 32)) for rank in order]
    return [Tenant(f"t{index}", KINDS[index % 3], size, seed * 10_000 + index) for index, size in enumerate(sizes)]


async def run(tenant: Tenant, service: Service, record: Record, batch_time: Callable[[Tenant], float]) -> None:
    """Batches of a tenant without pause. `batch_time`: of one batch on an idle cell."""
    rng = np.random.default_rng(tenant.seed)
    await asyncio.sleep(float(rng.uniform(0, 10)))
    version: str | None = None
    sequence = itertools.count(1)
    while True:
        began = now()
        if tenant.kind == "groups":
            rows = await _groups(tenant, service, rng, version)
        elif tenant.kind == "agents":
            rows = await _agents(tenant, service, rng, version)
        else:
            rows = Rows(rng.integers(100, 500, 16 * tenant.size), np.zeros(16 * tenant.size, np.int64))
        await service.train(tenant, next(sequence), rows)
        await service.step(tenant, next(sequence))
        if tenant.kind != "supervised":
            version = await service.publish(tenant, next(sequence))
        record.batches += 1
        record.busy_s += now() - began
        record.ideal_s += batch_time(tenant)


async def _groups(tenant: Tenant, service: Service, rng: np.random.Generator, version: str | None) -> Rows:
    """Groups of answers to different prompts, all at once."""

    async def group(number: int, prompt: np.ndarray, seed: int) -> tuple[int, list[int]]:
        request = SampleRequest(
            request_id=f"{tenant.name}-{number}", prompt=prompt, version=version, num_samples=GROUP, seed=seed,
            top_k=ANSWER_TOKENS, max_tokens=MAX_TOKENS, cache_scope=tenant.name,
        )  # fmt: skip
        return len(prompt), await service.sample(tenant, request)

    prompts = [rng.integers(0, 50_000, rng.integers(200, 800)).astype(np.int32) for _ in range(4 * tenant.size)]
    calls = [group(number, prompt, int(rng.integers(1 << 40))) for number, prompt in enumerate(prompts)]
    lengths, shared = [], []
    for prompt_tokens, answers in await asyncio.gather(*calls):
        lengths += [prompt_tokens + answer for answer in answers]
        shared += [0, *[prompt_tokens] * (len(answers) - 1)]
    return Rows(np.array(lengths, np.int64), np.array(shared, np.int64))


async def _agents(tenant: Tenant, service: Service, rng: np.random.Generator, version: str | None) -> Rows:
    """Agents beside each other, whose prompt grows by an answer and a tool's output each turn."""
    system = rng.integers(0, 50_000, SYSTEM_TOKENS).astype(np.int32)

    async def agent(number: int, seed: int) -> int:
        own = np.random.default_rng(seed)
        prompt = np.concatenate([system, own.integers(0, 50_000, 100).astype(np.int32)])
        for turn in range(int(own.integers(6, 41))):
            request = SampleRequest(
                request_id=f"{tenant.name}-{number}-{turn}", prompt=prompt, version=version, seed=seed + turn,
                top_k=TURN_TOKENS, max_tokens=MAX_TOKENS, cache_scope=tenant.name,
            )  # fmt: skip
            (length,) = await service.sample(tenant, request)
            added = own.integers(0, 50_000, length + TOOL_TOKENS).astype(np.int32)
            prompt = np.concatenate([prompt, added])
            await asyncio.sleep(float(own.exponential(1.0)))  # the tool
        return len(prompt)

    seeds = [int(rng.integers(1 << 40)) for _ in range(8 * tenant.size)]
    lengths = await asyncio.gather(*(agent(number, seed) for number, seed in enumerate(seeds)))
    shared = [0] + [SYSTEM_TOKENS] * (len(lengths) - 1)
    return Rows(np.array(lengths, np.int64), np.array(shared, np.int64))
