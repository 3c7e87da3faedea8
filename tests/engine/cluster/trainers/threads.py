"""A group of ranks in threads of this process: everything of a group but torch.distributed and the processes."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

from tinsmith.engine.cluster.config import ClusterConfig, RankConfig
from tinsmith.engine.cluster.trainers.rank import FollowingRank, LeadingRank
from tinsmith.engine.cluster.trainers.ranks import Ranks
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.general import choice
from tinsmith.engine.torch_engine import TorchEngine

_loading = threading.Lock()
"""transformers loads one model at a time."""


class Table:
    """Where ranks put values for each other."""

    def __init__(self, world: int) -> None:
        self.values: list[Any] = [None] * world
        self.barrier = threading.Barrier(world)
        self.exchanges = 0


class ThreadCollectives:
    """The methods of `ranks.Collectives` over a table."""

    def __init__(self, rank: int, table: Table) -> None:
        self.rank, self.world, self._table = rank, len(table.values), table

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(function, *args)

    def gather_everywhere(self, value: Any) -> list[Any]:
        self._table.values[self.rank] = pickle.dumps(value)
        self._table.barrier.wait()
        values = [pickle.loads(sent) for sent in self._table.values]
        if self._table.barrier.wait() == 0:
            self._table.exchanges += 1
        return values

    def broadcast(self, value: Any) -> Any:
        return self.gather_everywhere(value)[0]

    def gather(self, value: Any) -> list[Any]:
        values = self.gather_everywhere(value)
        return values if self.rank == 0 else []

    def least(self, value: int) -> int:
        return min(self.gather_everywhere(value))

    def sum(self, flat: torch.Tensor) -> None:
        flat.copy_(torch.stack(self.gather_tensors(flat)).sum(0))

    def gather_tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return self.gather_everywhere(flat)


class ThreadGroup:
    """A group whose leading rank is called from the test's thread."""

    def __init__(self, folder: Path, trainers: int, *, deterministic: bool = False, shards: int = 0) -> None:
        cluster = ClusterConfig(trainers=trainers, shards=shards)
        config = EngineConfig(
            source=str(folder), dtype="float32", device="cpu", threads=1, deterministic=deterministic, pass_tokens=64
        )
        self.table, self.engines = Table(trainers), [None] * trainers
        self._loop, self._leader = asyncio.new_event_loop(), asyncio.Event()
        self._ready = threading.Barrier(trainers + 1)
        self.leader: LeadingRank
        self._threads = [threading.Thread(target=self._run, args=(config, cluster, rank)) for rank in range(trainers)]
        for thread in self._threads:
            thread.start()
        self._ready.wait()

    def wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine of the leading rank to its end."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(240)

    def close(self) -> None:
        self.table.barrier.abort()
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        self._loop.close()

    def _run(self, config: EngineConfig, cluster: ClusterConfig, rank: int) -> None:
        collectives: Any = ThreadCollectives(rank, self.table)
        ranks = Ranks(RankConfig(engine=config, cluster=cluster, rank=rank, rendezvous=""), collectives)
        with _loading:
            base = choice.load(config)
        self.engines[rank] = engine = TorchEngine(config, base, ranks)  # type: ignore[call-overload]
        if rank == 0:
            self.leader = LeadingRank(engine, ranks, collectives)
        self._ready.wait()
        if rank == 0:
            asyncio.set_event_loop(self._loop)
            self._loop.run_forever()
            return
        with contextlib.suppress(threading.BrokenBarrierError):
            asyncio.run(FollowingRank(engine, ranks, collectives).follow())
