"""A trainer group as arithmetic: the service's own selection of requests, shares of ranks, owners in turn.

Passes that run beside each other share micro-batches: they divide the fixed cost of one among them, and fill the ranks
that wait for the largest share of another.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scale.clock import now
from benchmarks.scale.hardware import Hardware
from tinsmith.engine.base import OnDelta, Pass, SampleRequest, SampleResult, SavedAdapter
from tinsmith.engine.training.shares import RowCosts, balanced
from tinsmith.errors import EngineDied
from tinsmith.service.storage.records import QueuedRequest
from tinsmith.service.training.scheduler import Group, next_groups

BATCH_TOKENS = 8192
CAPTURE_EVERY = 10


@dataclass(frozen=True, slots=True)
class Rows:
    """Lengths of the rows of a pass in packing order, and what each shares with the row before (int64 [R])."""

    lengths: np.ndarray
    shared: np.ndarray

    @property
    def tokens(self) -> int:
        """Without packing."""
        return int(self.lengths.sum())

    def costs(self) -> RowCosts:
        """Packed tokens, as `shares` takes them."""
        ends = np.concatenate([[0], np.cumsum(self.lengths - self.shared)])
        return RowCosts(ends.astype(np.int64), self.shared)


@dataclass(eq=False, slots=True)
class _Running:
    group: Group
    left: float
    """Seconds of computing, shared out evenly."""
    extra: float
    """What its fixed cost and its uneven shares add to a second of it, if it runs alone."""


@dataclass(slots=True)
class _Work:
    seconds: float
    """Of computing, shared out evenly."""
    extra: float
    """Seconds of fixed cost, and of waiting for the largest share, if it runs alone."""
    done: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SimulatedTrainer:
    """Ranks that train one base model. Owners get equal parts of the group's time while they have work.

    The version half of `engine.interface.Sampler` is what a pool needs; it does not sample.
    """

    def __init__(self, ranks: int, hardware: Hardware) -> None:
        self.ranks, self._hardware = ranks, hardware
        self.down_until = 0.0
        self.lost_s = 0.0
        """Seconds of computing that a death has undone."""
        self._requests: dict[str, QueuedRequest] = {}
        self._work: dict[str, _Work] = {}
        self._groups: list[_Running] = []
        self._numbers = itertools.count()
        self._time = now()
        self._timer: asyncio.TimerHandle | None = None
        self._since_capture: defaultdict[str, float] = defaultdict(float)
        """Seconds of work of each model since its last captured state."""
        self._steps: Counter[str] = Counter()
        self._replay: defaultdict[str, float] = defaultdict(float)

    @property
    def is_busy(self) -> bool:
        """Whether it computes."""
        return bool(self._groups) and now() >= self.down_until

    @property
    def useful_share(self) -> float:
        """Part of the ranks that computes now, of those that could: the rest waits for the largest share."""
        return sum(self._speeds())

    @property
    def waiting(self) -> int:
        """Requests that do not run."""
        return len(self._requests)

    async def train(self, owner: str, model: str, seq: int, rows: Rows) -> float:
        """A forward_backward; returns when it began to run."""
        costs = rows.costs()
        bounds = balanced(costs, self.ranks)
        shares = [costs.cost(start, stop) for start, stop in itertools.pairwise(bounds)]
        even = int(costs.ends[-1]) / self.ranks * self._hardware.train_per_token_s
        extra = self._hardware.train_pass_s + max(shares) * self._hardware.train_per_token_s - even
        operation = Pass(model_id=model, data=(), loss_fn="cross_entropy")
        return await self._submit(owner, model, seq, operation, rows.tokens, _Work(even, extra))

    async def step(self, owner: str, model: str, seq: int) -> float:
        """An optim_step; returns when it began to run."""
        return await self._submit(owner, model, seq, None, 0, _Work(self._hardware.optimizer_s, 0.0))

    def die(self) -> None:
        """End all ranks; what runs, and what no captured state covers, runs again."""
        self._advance()
        self.down_until = now() + self._hardware.notice_s + self._hardware.load_s
        for each in self._groups:
            for request in each.group:
                self._requests[request.id] = request
        self._groups = []
        for model, seconds in self._since_capture.items():
            self._replay[model] += seconds
        self.lost_s += sum(self._since_capture.values())
        self._since_capture.clear()
        asyncio.get_running_loop().call_at(self.down_until, self._start)

    async def capture(self, model_id: str, version: str) -> None:
        """Takes milliseconds, which count as the service's."""

    async def persist(self, version: str, to: Path) -> int:
        await asyncio.sleep(self._hardware.publish_s)
        return 0

    async def attach(self, version: str, source: SavedAdapter) -> None:
        """Nothing to do."""

    async def detach(self, version: str) -> None:
        """Nothing to do."""

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        raise EngineDied("It does not sample.")

    async def cancel(self, request_id: str) -> None:
        """Nothing runs."""

    async def _submit(self, owner: str, model: str, seq: int, operation: Any, tokens: int, work: _Work) -> float:
        number = next(self._numbers)
        request = QueuedRequest(
            id=str(number), owner=owner, model_id=model, seq=seq, order=number, operation=operation, tokens=tokens
        )
        self._requests[request.id] = request
        self._work[request.id] = work
        self._start()
        return await work.done

    def _start(self) -> None:
        """Start the groups that the service would start."""
        if now() < self.down_until:
            return
        self._advance()
        running = [each.group for each in self._groups]
        for group in next_groups(self._requests.values(), running, BATCH_TOKENS):
            for request in group:
                del self._requests[request.id]
            works = [self._work[request.id] for request in group]
            seconds = sum(work.seconds for work in works)
            extra = sum(work.extra for work in works) / seconds
            seconds += self._replay.pop(group[0].model_id, 0.0)
            self._groups.append(_Running(group, seconds, extra))
        self._plan()

    def _speeds(self) -> list[float]:
        weights = Counter(each.group[0].owner for each in self._groups)
        count = len(self._groups)
        return [1 / len(weights) / weights[each.group[0].owner] / (1 + each.extra / count) for each in self._groups]

    def _advance(self) -> None:
        passed = now() - self._time
        if passed:
            for each, speed in zip(self._groups, self._speeds(), strict=True):
                each.left -= passed * speed
        self._time = now()

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._groups:
            delay = min(each.left / speed for each, speed in zip(self._groups, self._speeds(), strict=True))
            self._timer = asyncio.get_running_loop().call_later(max(0.0, delay), self._on_end)

    def _on_end(self) -> None:
        self._advance()
        ended = [each for each in self._groups if each.left <= 1e-9]
        self._groups = [each for each in self._groups if each.left > 1e-9]
        for each in ended:
            for request in each.group:
                self._finish(request)
        self._start()

    def _finish(self, request: QueuedRequest) -> None:
        work = self._work.pop(request.id)
        model = request.model_id
        self._since_capture[model] += work.seconds
        if not request.packs:
            self._steps[model] += 1
            if self._steps[model] % CAPTURE_EVERY == 0:
                del self._since_capture[model]
        work.done.set_result(now())
