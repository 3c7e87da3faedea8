"""A group of ranks as one engine: started together, ended together.

The service calls rank 0, which has the others follow. If a rank ends, the others are of no use: all are killed, and
only when every process is confirmed gone does the group count as dead, so that the next generation finds the devices
free. The service then starts another group and replays what was acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import ParamSpec, TypeVar

from typing_extensions import override

from tinsmith.engine.base import ModelCard
from tinsmith.engine.cluster.config import ClusterConfig, RankConfig
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.process_end import ProcessEnd
from tinsmith.engine.processes.client import RemoteEngine, ServedEngine, start_engine
from tinsmith.engine.processes.heartbeat import (
    HEARTBEAT_S,
    SILENCE_S,
    SILENCE_SHARE,
    Heartbeat,
    HeartbeatMonitor,
)
from tinsmith.engine.processes.rpc import Method
from tinsmith.engine.processes.slots import Program, Slot, free_port
from tinsmith.errors import EngineDied, PortTakenError

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

RANK = Program(module="tinsmith.engine.cluster.trainers.rank")
PORT_ATTEMPTS = 3
"""Attempts at a group whose rendezvous port another program takes before rank 0 does."""
CAUSE_S = 1.0
"""Time in which the rank that ended first may show, after one that ended because it lost another."""
LOST_PEER = "exit status 70"
"""The end of a rank that has lost another (`ranks.LOST_PEER_STATUS`)."""

_RETRY = "It is being restarted: try again later."


class GroupEngine(ServedEngine):
    """Implements `engine.interface.Engine` over the ranks of a group, of which the first leads."""

    def __init__(self, ranks: Sequence[RemoteEngine]) -> None:
        self._ranks = ranks
        self.leader.explain_death = self._explain_death
        self.died = asyncio.Event()
        self.end: ProcessEnd | None = None
        """Why the group ended."""
        self.heartbeats = HeartbeatMonitor()
        """Of all ranks together: one that waits for another makes no progress of its own."""
        self._tasks = [asyncio.create_task(self._end_together()), asyncio.create_task(self._count_progress())]

    @property
    @override
    def card(self) -> ModelCard:
        return self._ranks[0].card

    @property
    @override
    def progress(self) -> int:
        return sum(rank.progress for rank in self._ranks)

    @property
    @override
    def leader(self) -> RemoteEngine:
        return self._ranks[0]

    @property
    @override
    def pid(self) -> int:
        return self._ranks[0].pid

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks, each on its machine."""
        return [rank.pid for rank in self._ranks]

    @override
    def running(self) -> str:
        """The calls without a reply."""
        return self._ranks[0].running()

    @override
    async def stalled(self, timeout_s: float) -> ProcessEnd:
        """Wait until a rank sends no heartbeats, or none makes progress for `timeout_s` while calls run."""
        silence_s = min(SILENCE_S, SILENCE_SHARE * timeout_s)
        watches = [
            asyncio.create_task(rank.heartbeats.stalled(math.inf, silence_s, lambda: False)) for rank in self._ranks
        ]
        watches.append(asyncio.create_task(self.heartbeats.stalled(timeout_s, math.inf, lambda: bool(self.running()))))
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for watch in watches:
                watch.cancel()

    @override
    def kill(self, end: ProcessEnd) -> None:
        """End all ranks at once, even those that are stopped. Calls fail as after their death."""
        self.end = self.end or end
        for rank in self._ranks:
            if not rank.died.is_set():
                rank.kill(end)

    @override
    async def call(self, method: Method[P, R], *args: P.args, **options: P.kwargs) -> R:
        return await self.leader.call(method, *args, **options)

    async def _explain_death(self, error: EngineDied) -> EngineDied:
        """The death of the group, once its reason is known, for that of rank 0."""
        await self.died.wait()
        if self.end is None:
            return error
        return EngineDied(
            f"A training process has ended ({self.end.text}).", _RETRY, from_outside=self.end.from_outside
        )

    @override
    async def close(self) -> None:
        """End all ranks and wait for them."""
        for task in self._tasks:
            task.cancel()
        self.died.set()
        await asyncio.gather(*(rank.close() for rank in self._ranks))

    async def _count_progress(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.heartbeats.beat(Heartbeat(self.progress))

    async def _end_together(self) -> None:
        """Wait until a rank ends, end the others, and set `died` when all are gone."""
        deaths = {asyncio.create_task(rank.died.wait()) for rank in self._ranks}
        _, alive = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        while alive and self._cause() is None:
            ended, alive = await asyncio.wait(alive, timeout=CAUSE_S, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                break
        ranks = [number for number, rank in enumerate(self._ranks) if rank.died.is_set()]
        end = self.end or self._cause() or ProcessEnd("its connection to the other ranks failed", from_outside=True)
        log.warning("Rank %s of %s ended (%s): all are ended.", ranks, self.card.source, end.text)
        self.kill(end)
        await asyncio.gather(*(rank.close() for rank in self._ranks))
        self.end = end
        self.died.set()

    def _cause(self) -> ProcessEnd | None:
        """The end of a rank that did not end because it had lost another."""
        ends = (rank.end for rank in self._ranks if rank.died.is_set())
        return next((end for end in ends if end is not None and end.text != LOST_PEER), None)


async def start_group(
    slots: Sequence[Slot], config: EngineConfig, cluster: ClusterConfig, generation: int, payload: bytes = b""
) -> GroupEngine:
    """Start a rank in each slot and wait until all have loaded the base model. The first slot leads.

    `payload`: of the launch tokens (`files.cached_engine`).
    Raises the error of loading, or EngineDied if a rank ended; all are then ended. Raises ConfigError if the settings
    do not fit.
    """
    cluster.shards_of_rows(deterministic=config.deterministic)
    for _ in range(PORT_ATTEMPTS - 1):
        with suppress(PortTakenError):
            return await _start_ranks(slots, config, cluster, generation, payload)
    return await _start_ranks(slots, config, cluster, generation, payload)


async def _start_ranks(
    slots: Sequence[Slot], config: EngineConfig, cluster: ClusterConfig, generation: int, payload: bytes
) -> GroupEngine:
    rendezvous = f"tcp://{slots[0].host}:{await slots[0].run(free_port, slots[0].host)}"
    starts = []
    for number, slot in enumerate(slots):
        rank = RankConfig(
            engine=config,
            cluster=cluster,
            rank=number,
            rendezvous=rendezvous,
        )
        starts.append(asyncio.create_task(start_engine(slot, rank, config.source, generation, RANK, payload)))
    try:
        return GroupEngine(await asyncio.gather(*starts))
    except BaseException as error:
        for start in starts:
            start.cancel()
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        await asyncio.gather(*(slot.end() for slot in slots))
        for outcome in outcomes:
            if isinstance(outcome, RemoteEngine):
                await outcome.close()
        if isinstance(error, EngineDied):  # it may have ended because another rank could not load
            raise next(
                (e for e in outcomes if isinstance(e, Exception) and not isinstance(e, EngineDied)), error
            ) from None
        raise
