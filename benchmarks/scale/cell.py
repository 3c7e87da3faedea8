"""A cell in simulated time: the service's own queue, pool and selection of requests over engines as arithmetic."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scale import tenants
from benchmarks.scale.clock import now, simulate
from benchmarks.scale.hardware import Hardware
from benchmarks.scale.samplers import PromptCounts, SimulatedSampler, SimulatedSlots
from benchmarks.scale.tenants import Record, Rows, Service, Tenant, active_tenants, answer_lengths
from benchmarks.scale.trainers import SimulatedTrainer
from tinsmith.engine.base import SampleRequest
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.service.engines.admission import AdmissionQueue

PROBE_S = 0.05
PATIENCE_S = 0.02
"""A GPU counts as idle for want of the API process when that is further than this from its oldest request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A simulation.

    Example: Plan(trainers=16, samplers=48, tenants=62, seconds=120.0)
    """

    trainers: int
    samplers: int
    tenants: int
    seconds: float
    """Simulated, after a start of a fifth of it that does not count."""
    seed: int = 1
    api_cores: float = 1.0
    """Speed of the API process; infinite for one that costs nothing."""
    sampler_deaths: tuple[float, ...] = ()
    """Times, as parts of `seconds`."""
    trainer_deaths: tuple[float, ...] = ()
    hardware: Hardware = field(default_factory=Hardware)


@dataclass(slots=True)
class Outcome:
    """What a simulation has counted."""

    plan: Plan
    samplers: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """GPU-seconds of sampler replicas: used, and lost by reason."""
    trainers: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    api_busy_s: float = 0.0
    sequences: float = 0.0
    """Mean running sequences of a busy replica."""
    hits: float = 0.0
    most: float = 0.0
    """Share of prompt tokens that the replicas' caches, and one endless cache, have found."""
    sampled_tokens: int = 0
    trained_tokens: int = 0
    records: dict[Tenant, Record] = field(default_factory=dict)
    busiest: float = 0.0
    """Sampled tokens of the busiest replica by the mean."""
    undone_s: float = 0.0
    moved: int = 0

    def utilisation(self, usage: Mapping[str, float]) -> float:
        """Used GPU-seconds of those in which there was work."""
        there = sum(seconds for reason, seconds in usage.items() if reason != "no work")
        return usage["used"] / there if there else 0.0

    def waits(self, sizes: range, *, passes: bool = False) -> list[float]:
        """Waits of the tenants of these sizes, for samples or for passes."""
        records = [record for tenant, record in self.records.items() if tenant.size in sizes]
        return [wait for record in records for wait in (record.pass_waits if passes else record.waits)]

    def speeds(self) -> list[float]:
        """Of each tenant: the time of its batches on an idle cell, by the time that they took."""
        return [record.ideal_s / record.busy_s for record in self.records.values() if record.busy_s]


class Core:
    """The API process: one thing at a time, in order."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._free = 0.0
        self.busy_s = 0.0

    @property
    def backlog_s(self) -> float:
        """Time until it has done all that it was given."""
        return max(0.0, self._free - now())

    async def use(self, milliseconds: float) -> None:
        """Wait until it has spent this on a request."""
        seconds = milliseconds / 1000 / self._cores
        self._free = max(self._free, now()) + seconds
        self.busy_s += seconds
        await asyncio.sleep(self._free - now())


class Cell:
    """One service with its engines."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.hardware = plan, plan.hardware
        self.counts = PromptCounts()
        self.core = Core(plan.api_cores)
        self.trainer = SimulatedTrainer(plan.trainers, plan.hardware)
        self.slots = SimulatedSlots(plan.samplers, plan.hardware, answer_lengths, self.counts)
        self.queue = AdmissionQueue(plan.hardware.cache_tokens)
        self.outcome = Outcome(plan)
        self.by_replica: Counter[int] = Counter()
        self.publishing = 0
        self._pool: SamplerPool | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._number = 0

    @property
    def pool(self) -> SamplerPool:
        """The replicas."""
        assert self._pool is not None
        return self._pool

    async def start(self) -> Service:
        """Start the replicas; returns what tenants call."""
        self._pool = await SamplerPool.start(self.slots.launches(), trainer=self.trainer)
        self.pool.on_change = lambda: self.queue.resize(max(1, self.pool.living))
        self.pool.on_change()
        return Service(sample=self.sample, train=self.train, step=self.step, publish=self.publish)

    async def spend(self, milliseconds: Callable[[Hardware], float]) -> None:
        """Wait until a request has had its time of the API process."""
        await self.core.use(milliseconds(self.hardware))

    async def sample(self, tenant: Tenant, request: SampleRequest) -> list[int]:
        began = now()
        tokens = len(request.prompt)
        await self.spend(lambda cpu: cpu.api_sample_ms + cpu.api_sample_per_prompt_token_ms * tokens)
        async with self.queue.admit(tenant.name, request):
            admitted = now()
            result = await self.pool.sample(request)
        lengths = [len(sequence.tokens) for sequence in result.sequences]
        for place, process in enumerate(self.slots.current):
            if process is not None and (wait := process.waits.pop(request.request_id, None)) is not None:
                self.outcome.records[tenant].waits.append(admitted - began + wait)
                self.by_replica[place] += sum(lengths)
        await self.core.use(self.hardware.api_answer_token_ms * sum(lengths))
        self.outcome.sampled_tokens += sum(lengths)
        return lengths

    async def train(self, tenant: Tenant, sequence: int, rows: Rows) -> None:
        began = now()
        await self.spend(lambda cpu: cpu.api_pass_ms + cpu.api_pass_per_token_ms * rows.tokens)
        await self.trainer.train(tenant.name, tenant.name, sequence, rows)
        self.outcome.trained_tokens += rows.tokens - int(rows.shared.sum())
        self.outcome.records[tenant].pass_waits.append(max(0.0, now() - began - self._alone(rows)))

    async def step(self, tenant: Tenant, sequence: int) -> None:
        await self.spend(lambda cpu: cpu.api_step_ms)
        await self.trainer.step(tenant.name, tenant.name, sequence)

    async def publish(self, tenant: Tenant, sequence: int) -> str:
        """A new version; the one before is deleted once it is published."""
        await self.spend(lambda cpu: cpu.api_step_ms)
        version = f"{tenant.name}/{sequence}"
        await self.pool.capture(tenant.name, version)

        async def write() -> None:
            self.publishing += 1
            await self.pool.persist(version, Path(version))
            self.publishing -= 1

        task = asyncio.create_task(write())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return version

    def _alone(self, rows: Rows) -> float:
        packed = rows.tokens - int(rows.shared.sum())
        return self.hardware.train_pass_s + packed / self.plan.trainers * self.hardware.train_per_token_s

    async def probe(self) -> None:
        """Count what every GPU does, again and again."""
        sequences: list[int] = []
        while True:
            await asyncio.sleep(PROBE_S)
            living = [process for process in self.slots.current if process is not None]
            for process in self.slots.current:
                self.outcome.samplers[self._sampler_state(process, living)] += PROBE_S
            sequences += [process.sequences for process in living if process.sequences]
            self.outcome.sequences = float(np.mean(sequences)) if sequences else 0.0
            state = self._trainer_state()
            useful = self.trainer.useful_share if state == "used" else 1.0
            self.outcome.trainers[state] += PROBE_S * self.plan.trainers * useful
            self.outcome.trainers["fixed cost and uneven shares"] += PROBE_S * self.plan.trainers * (1 - useful)

    def _sampler_state(self, process: SimulatedSampler | None, living: Sequence[SimulatedSampler]) -> str:
        if process is None:
            return "death"
        if process.is_busy:
            return "used"
        if process.attaching:
            return "load of versions"
        if any(other.waiting for other in living) or self.queue.waiting():
            return "routing"
        if self.publishing:
            return "publication"
        return "API process" if self.core.backlog_s > PATIENCE_S else "no work"

    def _trainer_state(self) -> str:
        if now() < self.trainer.down_until:
            return "death"
        if self.trainer.is_busy:
            return "used"
        if self.trainer.waiting:
            return "scheduling"
        return "API process" if self.core.backlog_s > PATIENCE_S else "no work"


async def _run(plan: Plan) -> Outcome:
    cell = Cell(plan)
    service = await cell.start()
    active = active_tenants(plan.tenants, plan.seed)
    outcome = cell.outcome
    outcome.records = defaultdict(Record)
    tasks = [
        asyncio.create_task(tenants.run(each, service, outcome.records[each], lambda tenant: _batch_time(tenant, plan)))
        for each in active
    ]
    await asyncio.sleep(plan.seconds / 5)
    for record in outcome.records.values():
        record.waits.clear()
        record.pass_waits.clear()
    cell.counts.tokens = cell.counts.hits = cell.counts.most = 0
    outcome.sampled_tokens = outcome.trained_tokens = 0
    cell.by_replica.clear()
    busy = cell.core.busy_s
    loop = asyncio.get_running_loop()
    start = now()
    for part in plan.trainer_deaths:
        loop.call_at(start + part * plan.seconds, cell.trainer.die)
    for place, part in enumerate(plan.sampler_deaths):
        process = cell.slots.current[place]
        if process is not None:
            loop.call_at(start + part * plan.seconds, process.die)
    probe = asyncio.create_task(cell.probe())
    await asyncio.sleep(plan.seconds)
    for task in [probe, *tasks]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [error for error in done if isinstance(error, Exception)]
    if errors:
        raise errors[0]
    outcome.api_busy_s = cell.core.busy_s - busy
    outcome.hits = cell.counts.hits / max(1, cell.counts.tokens)
    outcome.most = cell.counts.most / max(1, cell.counts.tokens)
    loads = [cell.by_replica[place] for place in range(plan.samplers)]
    outcome.busiest = max(loads) / max(1e-9, float(np.mean(loads)))
    outcome.undone_s = cell.trainer.lost_s
    outcome.moved = cell.pool.counts.moved
    await cell.pool.close()
    return outcome


def _batch_time(tenant: Tenant, plan: Plan) -> float:
    """About the time of a batch on an idle cell: its longest answer or agent, then its pass and step."""
    hardware = plan.hardware
    tokens = {"groups": 4 * 2900, "agents": 8 * 6000, "supervised": 16 * 300}[tenant.kind] * tenant.size
    sampling = {"groups": 15.0, "agents": 110.0, "supervised": 0.0}[tenant.kind]
    fixed = hardware.train_pass_s + hardware.optimizer_s
    return sampling + tokens * hardware.train_per_token_s / plan.trainers + fixed


def run_plan(plan: Plan) -> Outcome:
    """Simulate a cell."""
    return simulate(_run(plan))
