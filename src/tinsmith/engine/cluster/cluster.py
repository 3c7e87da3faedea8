"""The processes of one base model as one engine: training processes, and sampling processes beside them.

A `ModelCluster` belongs to a base model for as long as it is served. It keeps the slots and the sampling processes,
which outlive the training processes: each start of the latter has the next generation number, and is preceded by the
confirmed end of the processes before. A `ClusterEngine` is one such start, and what the service sees.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from tinsmith.engine.adapters.transfer import FolderTransfer, TransferringEngine
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.cluster.launches import torch_in_slot, vllm_in_slot
from tinsmith.engine.cluster.plan import plan, uses_gpus, with_threads
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.engine.cluster.replica import Launch, SamplerProcess
from tinsmith.engine.cluster.shared_gpu import SharedGpu
from tinsmith.engine.cluster.status import ProcessStatus
from tinsmith.engine.cluster.trainers.group import start_group
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.device_sharing import POLICIES
from tinsmith.engine.interface import Engine, Sampler
from tinsmith.engine.processes.client import ServedEngine, start_engine
from tinsmith.engine.processes.rpc import DelegatingEngine
from tinsmith.engine.processes.slots import Slot, Slots
from tinsmith.engine.vllm.adapters import check_rank
from tinsmith.engine.vllm.sampler import ZERO_ADAPTER, write_zero_adapter
from tinsmith.engine.vllm.server import find_python, sleeps
from tinsmith.errors import ConfigError

log = logging.getLogger(__name__)


class ClusterEngine(DelegatingEngine):
    """Trains with `trainer` and samples with `sampler`. Implements `engine.interface.Engine`."""

    def __init__(
        self,
        trainer: ServedEngine,
        engine: Engine,
        files: TransferringEngine,
        sampler: Sampler,
        max_rank: int | None = None,
    ) -> None:
        """`engine` is the trainer as far as it computes, `files` as far as it reads and writes folders. `max_rank`: of
        adapters that the samplers take; None for any."""
        super().__init__(engine, sampler)
        self.trainer = trainer
        self._files, self._max_rank = files, max_rank

    @override
    async def create(self, model_id: str, lora: LoraSpec) -> None:
        if self._max_rank is not None:
            check_rank("lora_config", lora.rank, self._max_rank)
        await super().create(model_id, lora)

    @override
    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        return await self._files.save(model_id, to, optimizer=optimizer)

    @override
    async def release_memory(self) -> None:
        await super().release_memory()
        if isinstance(self._sampler, SamplerPool):
            await self._sampler.release_memory()

    @property
    @override
    def progress(self) -> int:
        return self.trainer.progress

    @override
    async def close(self) -> None:
        """End the training processes; the sampling processes wait for the next."""
        await self.trainer.close()


class ModelCluster:
    """The slots and processes of one base model."""

    def __init__(
        self,
        config: EngineConfig,
        cluster: ClusterConfig,
        slots: Slots,
        folder: Path,
        transfer: FolderTransfer | None = None,
    ) -> None:
        """`folder`: where the service writes and reads the files of adapters; `transfer`: how they reach processes."""
        self.generation = 0
        self.pool: SamplerPool | None = None
        self._gpu: SharedGpu | None = None
        """Of the trainer and of the vLLM beside it."""
        self._has_vllm_here = config.sampler == "vllm" and not cluster.samplers
        """Whether a vLLM of this machine samples, with the devices of `vllm.devices` or the trainer's."""
        self._shares_gpu = self._has_vllm_here and not config.vllm.devices
        self._config, self._cluster, self._slots, self._shared = config, cluster, slots, folder
        self._transfer = transfer or FolderTransfer()
        self._trainer_slots: Sequence[Slot] = ()
        self._sampler_slots: Sequence[Slot] = ()
        self._group_slots: Sequence[Slot] = ()
        """Slots of the group that was started last: fewer where machines were lost."""
        self._trainer: ServedEngine | None = None

    async def start(self) -> ClusterEngine:
        """Start the training processes, at the first time with slots and sampling processes.

        Raises the error of the start. At the first time nothing is left running then.
        """
        is_first = not self._trainer_slots
        try:
            if is_first:
                await self._take_slots()
            trainer = await self._start_processes()
        except BaseException:
            if is_first:
                await self.close()
            raise
        self._trainer = trainer
        is_vllm = self.pool is not None and self._config.sampler == "vllm"
        engine = trainer.leader if self._gpu is None else self._gpu.trainer(trainer.leader)
        files = TransferringEngine(trainer, self._transfer)
        max_rank = self._config.vllm.rank if is_vllm else None
        return ClusterEngine(trainer, engine, files, self.pool or files, max_rank)

    async def close(self) -> None:
        """End all processes and give the slots back."""
        await self._close_pool()
        slots = [*self._trainer_slots, *self._sampler_slots]
        self._trainer_slots, self._sampler_slots, self._trainer = (), (), None
        await self._slots.give_back(slots)

    def status(self) -> list[ProcessStatus]:
        """All processes: trainers first."""
        runs = self._trainer is not None and not self._trainer.died.is_set()
        running = (self._group_slots if self._cluster.is_group else self._trainer_slots) if runs else ()
        trainers = [
            ProcessStatus(
                name=slot.name,
                role="trainer",
                machine=slot.machine,
                host=slot.host,
                gpus=slot.gpus,
                pid=slot.process.pid if slot.process is not None and slot in running else 0,
                generation=self.generation,
                is_up=slot in running,
            )
            for slot in self._trainer_slots
        ]
        samplers = self.pool.status() if self.pool is not None else []
        return trainers + [
            ProcessStatus(
                name=slot.name,
                role="sampler",
                machine=slot.machine,
                host=slot.host,
                gpus=slot.gpus,
                pid=status.pid,
                generation=status.starts,
                is_up=status.up,
                running=status.requests,
                cache_tokens=status.cache_tokens,
                versions=status.versions,
            )
            for slot, status in zip(self._sampler_slots, samplers, strict=False)
        ]

    async def _close_pool(self) -> None:
        pool, self.pool = self.pool, None
        gpu, self._gpu = self._gpu, None
        if pool is not None:
            await pool.close()
        if gpu is not None:
            await gpu.close()

    async def _take_slots(self) -> None:
        machines = await self._slots.machines()
        gpus = 0 if self._has_vllm_here else int(uses_gpus(self._config, machines))
        cluster = self._cluster
        if cluster.sampler_gpus > 1 and not gpus:
            raise ConfigError(
                f"cluster.sampler_gpus={cluster.sampler_gpus} needs GPUs; there are none.", "Leave it out."
            )
        self._trainer_slots = await self._slots.reserve(cluster.trainers, name="trainer", gpus=gpus)
        self._sampler_slots = await self._slots.reserve(
            cluster.samplers or int(self._has_vllm_here),
            name="sampler",
            gpus=gpus * cluster.sampler_gpus,
            strategy="scatter",
        )
        await self._transfer.choose([*self._trainer_slots, *self._sampler_slots], self._shared)
        if not self._has_vllm_here:  # vLLM and its trainer have all cores, for often only one of them computes
            self._config = with_threads(self._config, self._trainer_slots, self._sampler_slots, machines)
        machines = await self._slots.machines()  # with what the slots know of them
        for line in plan(self._config, self._trainer_slots, self._sampler_slots, machines, is_sharded=cluster.shard):
            log.info("%s", line)

    async def _start_processes(self) -> ServedEngine:
        await asyncio.gather(*(slot.end() for slot in self._trainer_slots))  # confirmed, before others compute
        self.generation += 1
        if self._shares_gpu:
            await self._close_pool()  # the trainer measures the memory that is free
        if self.pool is not None or not self._sampler_slots:
            trainer = await self._start_trainer()
        elif self._config.sampler == "vllm":
            await asyncio.to_thread(find_python, self._config.vllm)
            trainer = await self._start_trainer()
            try:
                self.pool = await self._start_vllm(trainer)
            except BaseException:
                await trainer.close()
                raise
        else:
            payload = self._transfer.payload
            launches = [self._checked(slot, torch_in_slot(slot, self._config, payload)) for slot in self._sampler_slots]
            trainer, pool = await asyncio.gather(
                self._start_trainer(),
                SamplerPool.start(launches, transfer=self._transfer),
                return_exceptions=True,
            )
            self.pool = pool if isinstance(pool, SamplerPool) else None
            for outcome in (trainer, pool):
                if isinstance(outcome, BaseException):
                    raise outcome
            assert not isinstance(trainer, BaseException)
        if self.pool is not None:
            self.pool.use_trainer(self._sampling_trainer(trainer))
        return trainer

    def _sampling_trainer(self, trainer: ServedEngine) -> Engine:
        """The trainer for the pool: it writes versions, and samples what vLLM does not support."""
        files = TransferringEngine(trainer, self._transfer)
        return files if self._gpu is None else self._gpu.trainer(files)

    async def _start_trainer(self) -> ServedEngine:
        slots, cluster = await self._group() if self._cluster.is_group else (self._trainer_slots, self._cluster)
        if self.generation > 1:
            await self._choose_again(slots)
        payload = self._transfer.payload
        if self._cluster.is_group:
            self._group_slots = slots
            return await start_group(slots, self._config, cluster, self.generation, payload)
        (slot,) = slots
        config = self._config.model_copy(update={"sampler": "torch"}) if self._sampler_slots else self._config
        return await start_engine(slot, config, self._config.source, self.generation, payload=payload)

    async def _choose_again(self, slots: Sequence[Slot]) -> None:
        """Find out how files reach slots that may be on other machines than before. Raises ConfigError, EngineDied."""
        have_machine = await asyncio.gather(*(slot.has_machine() for slot in slots))
        others = [slot for slot in (*self._trainer_slots, *self._sampler_slots) if slot not in slots]
        placed = [slot for slot, has_machine in zip(slots, have_machine, strict=True) if has_machine]
        await self._transfer.choose(placed, self._shared, others)

    def _checked(self, slot: Slot, launch: Launch) -> Launch:
        """A launch of a sampler that checks the slot's machine, which may be another one each time."""

        async def launch_again() -> SamplerProcess:
            await self._choose_again([slot])
            return await launch()

        return launch_again

    async def _group(self) -> tuple[Sequence[Slot], ClusterConfig]:
        """The slots of the next group: all, or those that have a machine, if others have lost theirs and the settings
        allow fewer."""
        slots, cluster = self._trainer_slots, self._cluster
        if not cluster.min_trainers:
            return slots, cluster
        have_machine = await asyncio.gather(*(slot.has_machine() for slot in slots))
        placed = [slot for slot, has_machine in zip(slots, have_machine, strict=True) if has_machine]
        smaller = cluster.group_on(len(placed), deterministic=self._config.deterministic)
        if len(placed) == len(slots) or smaller is None:
            return slots, cluster  # whose start says what is missing
        log.warning(
            "%s: %d of %d training processes have no machine; going on with %d.",
            *(self._config.source, len(slots) - len(placed), len(slots), smaller.trainers),
        )
        return placed[: smaller.trainers], smaller

    async def _start_vllm(self, trainer: ServedEngine) -> SamplerPool:
        """Start vLLM servers, which need the card of the loaded model."""
        is_cpu, transfer = trainer.card.device == "cpu", self._transfer
        zero_adapter = await self._zero_adapter(TransferringEngine(trainer, transfer)) if is_cpu else {}
        launches = [
            self._checked(slot, vllm_in_slot(slot, self._config, trainer.card, zero_adapter, transfer.payload))
            for slot in self._sampler_slots
        ]
        if self._shares_gpu:
            policy = POLICIES[self._config.sharing] if sleeps(self._config.vllm, trainer.card) else None
            self._gpu = SharedGpu(trainer.release_memory, policy)
            launches = [self._gpu.launch(launch) for launch in launches]
        return await SamplerPool.start(launches, trainer.card, transfer)

    async def _zero_adapter(self, trainer: TransferringEngine) -> dict[str, bytes]:
        """The files of an adapter that changes nothing, which is small."""
        with tempfile.TemporaryDirectory(prefix=".vllm-", dir=self._shared) as temporary:
            folder = Path(temporary) / ZERO_ADAPTER
            await write_zero_adapter(trainer, folder)
            await self._transfer.bring(folder)
            return {file.name: file.read_bytes() for file in folder.iterdir()}
