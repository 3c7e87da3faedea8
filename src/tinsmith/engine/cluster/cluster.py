"""The processes of one base model as one engine: training processes, and sampling processes beside them.

A `ModelCluster` belongs to a base model for as long as it is served. It keeps the seats and the sampling processes,
which outlive the training processes: each start of the latter has the next generation number, and is preceded by the
confirmed end of the processes before. A `ClusterEngine` is one such start, and what the service sees.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tinsmith.engine.base import AdamParams, LoraSpec, ModelCard, OnDelta, Pass, PassResult, SampleRequest, SampleResult
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.cluster.files.transfer import FolderTransfer, TransferringEngine
from tinsmith.engine.cluster.launches import torch_in_seat, vllm_in_seat
from tinsmith.engine.cluster.machines.plan import plan, uses_gpus, with_threads
from tinsmith.engine.cluster.placement import Places, Seat
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.engine.cluster.replica import Launch, StartedSampler
from tinsmith.engine.cluster.status import ProcessStatus
from tinsmith.engine.cluster.trainers.group import start_group
from tinsmith.engine.cluster.worker import start_engine
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.interface import Engine, Sampler
from tinsmith.engine.liveness import ProcessEnd, Pulse, Stall
from tinsmith.engine.vllm.adapters import check_rank
from tinsmith.engine.vllm.sampler import ZERO_ADAPTER, write_zero_adapter
from tinsmith.engine.vllm.server import find_python
from tinsmith.errors import ConfigError, EngineDied, TinsmithError

log = logging.getLogger(__name__)


class TrainerEngine(Engine, Protocol):
    """The training processes of one generation: an engine, and the process that the service watches."""

    died: asyncio.Event
    pulse: Pulse
    end: ProcessEnd | None

    @property
    def pid(self) -> int:
        """Id of the process that the service speaks to."""
        ...

    def running(self) -> str:
        """The calls without a reply, for the log."""
        ...

    async def stalled(self, timeout_s: float) -> Stall:
        """Wait until it counts as stalled."""
        ...

    async def call(self, method: str, *args: Any, on_delta: OnDelta | None = None, **options: Any) -> Any:
        """Call a method of the engine."""
        ...

    def kill(self, end: ProcessEnd) -> None:
        """End all its processes at once."""
        ...


class ClusterEngine:
    """Trains with `trainer` and samples with `sampler`. Implements `engine.interface.Engine`."""

    def __init__(
        self, trainer: TrainerEngine, files: TransferringEngine, sampler: Sampler, max_rank: int | None = None
    ) -> None:
        """`files` is the trainer as far as it reads and writes folders. `max_rank`: of adapters that the samplers take;
        None for any."""
        self.trainer, self._files = trainer, files
        self._sampler = sampler
        self._max_rank = max_rank

    @property
    def card(self) -> ModelCard:
        return self.trainer.card

    @property
    def progress(self) -> int:
        return self.trainer.progress

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        if self._max_rank is not None:
            check_rank("lora_config", lora.rank, self._max_rank)
        await self.trainer.create(model_id, lora)

    async def fork(self, model_id: str, source: str | Path, *, optimizer: bool) -> int:
        return await self._files.fork(model_id, source, optimizer=optimizer)

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        return await self.trainer.run(passes)

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        return await self.trainer.step(model_id, adam)

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        return await self._files.save(model_id, to, optimizer=optimizer)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        await self._files.load(model_id, source, optimizer=optimizer)

    async def drop(self, model_id: str) -> None:
        await self.trainer.drop(model_id)

    async def capture(self, model_id: str, version: str) -> None:
        await self._sampler.capture(model_id, version)

    async def persist(self, version: str, to: Path) -> int:
        return await self._sampler.persist(version, to)

    async def attach(self, version: str, source: Path) -> None:
        await self._sampler.attach(version, source)

    async def detach(self, version: str) -> None:
        await self._sampler.detach(version)

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        return await self._sampler.sample(request, on_delta)

    async def cancel(self, request_id: str) -> None:
        await self._sampler.cancel(request_id)

    async def release_memory(self) -> None:
        await self.trainer.release_memory()
        if isinstance(self._sampler, SamplerPool):
            await self._sampler.release_memory()

    async def close(self) -> None:
        """End the training processes; the sampling processes wait for the next."""
        await self.trainer.close()


class NoTrainer:
    """Stands for the trainer while there is none; captures nothing."""

    async def capture(self, model_id: str, version: str) -> None:
        raise self._death()

    async def persist(self, version: str, to: Path) -> int:
        raise self._death()

    async def attach(self, version: str, source: Path) -> None:
        raise self._death()

    async def detach(self, version: str) -> None:
        """There is nothing to delete."""

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        raise self._death()

    async def cancel(self, request_id: str) -> None:
        """Nothing runs."""

    def _death(self) -> EngineDied:
        return EngineDied("The training processes are not running.", "Try again later.", from_outside=True)


class ModelCluster:
    """The seats and processes of one base model."""

    def __init__(
        self,
        config: EngineConfig,
        cluster: ClusterConfig,
        places: Places,
        folder: Path,
        transfer: FolderTransfer | None = None,
    ) -> None:
        """`folder`: where the service writes and reads the files of adapters; `transfer`: how they reach processes."""
        self.generation = 0
        self.pool: SamplerPool | None = None
        self._config, self._cluster, self._places, self._shared = config, cluster, places, folder
        self._transfer = transfer or FolderTransfer()
        self._trainer_seats: Sequence[Seat] = ()
        self._sampler_seats: Sequence[Seat] = ()
        self._group_seats: Sequence[Seat] = ()
        """Seats of the group that was started last: fewer where machines were lost."""
        self._trainer: TrainerEngine | None = None

    async def start(self) -> ClusterEngine:
        """Start the training processes, at the first time with seats and sampling processes.

        Raises the error of the start. At the first time nothing is left running then.
        """
        is_first = not self._trainer_seats
        try:
            if is_first:
                await self._take_seats()
            trainer = await self._start_processes()
        except BaseException:
            if is_first:
                await self.close()
            raise
        self._trainer = trainer
        is_vllm = self.pool is not None and self._config.sampler == "vllm"
        files = TransferringEngine(trainer, self._transfer)
        return ClusterEngine(trainer, files, self.pool or files, self._config.vllm.rank if is_vllm else None)

    async def close(self) -> None:
        """End all processes and give the seats back."""
        pool, self.pool = self.pool, None
        if pool is not None:
            await pool.close()
        seats = [*self._trainer_seats, *self._sampler_seats]
        self._trainer_seats, self._sampler_seats, self._trainer = (), (), None
        await self._places.give_back(seats)

    def status(self) -> list[ProcessStatus]:
        """All processes: trainers first."""
        runs = self._trainer is not None and not self._trainer.died.is_set()
        running = (self._group_seats if self._cluster.is_group else self._trainer_seats) if runs else ()
        trainers = [
            ProcessStatus(
                name=seat.name,
                role="trainer",
                machine=seat.machine,
                host=seat.host,
                gpus=seat.gpus,
                pid=seat.process.pid if seat.process is not None and seat in running else 0,
                generation=self.generation,
                is_up=seat in running,
            )
            for seat in self._trainer_seats
        ]
        samplers = self.pool.status() if self.pool is not None else []
        return trainers + [
            ProcessStatus(
                name=seat.name,
                role="sampler",
                machine=seat.machine,
                host=seat.host,
                gpus=seat.gpus,
                pid=status.pid,
                generation=status.starts,
                is_up=status.up,
                running=status.requests,
                cache_tokens=status.cache_tokens,
                versions=status.versions,
            )
            for seat, status in zip(self._sampler_seats, samplers, strict=False)
        ]

    async def _take_seats(self) -> None:
        machines = await self._places.machines()
        gpus = int(uses_gpus(self._config, machines))
        cluster = self._cluster
        if cluster.sampler_gpus > 1 and not gpus:
            raise ConfigError(
                f"cluster.sampler_gpus={cluster.sampler_gpus} needs GPUs; there are none.", "Leave it out."
            )
        self._trainer_seats = await self._places.seats(cluster.trainers, name="trainer", gpus=gpus)
        self._sampler_seats = await self._places.seats(
            cluster.samplers, name="sampler", gpus=gpus * cluster.sampler_gpus, strategy="scatter"
        )
        await self._transfer.choose([*self._trainer_seats, *self._sampler_seats], self._shared)
        self._config = with_threads(self._config, self._trainer_seats, self._sampler_seats, machines)
        machines = await self._places.machines()  # with what the seats know of them
        for line in plan(self._config, self._trainer_seats, self._sampler_seats, machines, is_sharded=cluster.shard):
            log.info("%s", line)

    async def _start_processes(self) -> TrainerEngine:
        await asyncio.gather(*(seat.end() for seat in self._trainer_seats))  # confirmed, before others compute
        self.generation += 1
        if self.pool is not None or not self._sampler_seats:
            trainer = await self._start_trainer()
        elif self._config.sampler == "vllm":
            await asyncio.to_thread(find_python, self._config.vllm)
            trainer = await self._start_trainer()
            self.pool = await self._start_vllm(trainer)
        else:
            payload = self._transfer.payload
            launches = [self._checked(seat, torch_in_seat(seat, self._config, payload)) for seat in self._sampler_seats]
            trainer, pool = await asyncio.gather(
                self._start_trainer(),
                SamplerPool.start(NoTrainer(), launches, transfer=self._transfer),
                return_exceptions=True,
            )
            self.pool = pool if isinstance(pool, SamplerPool) else None
            for outcome in (trainer, pool):
                if isinstance(outcome, BaseException):
                    raise outcome
            assert not isinstance(trainer, BaseException)
        if self.pool is not None:
            self.pool.use_trainer(TransferringEngine(trainer, self._transfer))
        return trainer

    async def _start_trainer(self) -> TrainerEngine:
        seats, cluster = await self._group() if self._cluster.is_group else (self._trainer_seats, self._cluster)
        if self.generation > 1:
            await self._choose_again(seats)
        payload = self._transfer.payload
        if self._cluster.is_group:
            self._group_seats = seats
            return await start_group(seats, self._config, cluster, self.generation, payload)
        (seat,) = seats
        config = self._config.model_copy(update={"sampler": "torch"}) if self._sampler_seats else self._config
        return await start_engine(seat, config, self._config.source, self.generation, payload=payload)

    async def _choose_again(self, seats: Sequence[Seat]) -> None:
        """Find out how files reach seats that may be on other machines than before. Raises ConfigError, EngineDied."""
        have_place = await asyncio.gather(*(seat.has_place() for seat in seats))
        others = [seat for seat in (*self._trainer_seats, *self._sampler_seats) if seat not in seats]
        placed = [seat for seat, has_place in zip(seats, have_place, strict=True) if has_place]
        await self._transfer.choose(placed, self._shared, others)

    def _checked(self, seat: Seat, launch: Launch) -> Launch:
        """A launch of a sampler that checks the seat's machine, which may be another one each time."""

        async def launch_again() -> StartedSampler:
            await self._choose_again([seat])
            return await launch()

        return launch_again

    async def _group(self) -> tuple[Sequence[Seat], ClusterConfig]:
        """The seats of the next group: all, or those that have a machine, if others have lost theirs and the settings
        allow fewer."""
        seats, cluster = self._trainer_seats, self._cluster
        if not cluster.min_trainers:
            return seats, cluster
        have_place = await asyncio.gather(*(seat.has_place() for seat in seats))
        placed = [seat for seat, has_place in zip(seats, have_place, strict=True) if has_place]
        smaller = cluster.group_on(len(placed), deterministic=self._config.deterministic)
        if len(placed) == len(seats) or smaller is None:
            return seats, cluster  # whose start says what is missing
        log.warning(
            "%s: %d of %d training processes have no machine; going on with %d.",
            *(self._config.source, len(seats) - len(placed), len(seats), smaller.trainers),
        )
        return placed[: smaller.trainers], smaller

    async def _start_vllm(self, trainer: TrainerEngine) -> SamplerPool:
        """Start vLLM servers, which need the card of the loaded model."""
        files = TransferringEngine(trainer, self._transfer)
        zero_adapter = await self._zero_adapter(files) if trainer.card.device == "cpu" else {}
        launches = [
            self._checked(seat, vllm_in_seat(seat, self._config, trainer.card, zero_adapter, self._transfer.payload))
            for seat in self._sampler_seats
        ]
        return await SamplerPool.start(files, launches, trainer.card, self._transfer)

    async def _zero_adapter(self, trainer: TransferringEngine) -> dict[str, bytes]:
        """The files of an adapter that changes nothing, which is small."""
        with tempfile.TemporaryDirectory(prefix=".vllm-", dir=self._shared) as temporary:
            folder = Path(temporary) / ZERO_ADAPTER
            await write_zero_adapter(trainer, folder)
            await self._transfer.bring(folder)
            return {file.name: file.read_bytes() for file in folder.iterdir()}
