"""What a base model takes of the machines, decided before anything is loaded: GPUs, threads, and a plan of slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.machine import Machine
from tinsmith.engine.processes.slots import Slot
from tinsmith.plurals import counted


def uses_gpus(config: EngineConfig, machines: Sequence[Machine]) -> bool:
    """Whether the processes of a base model take a GPU each."""
    if config.kind == "fake" or config.device == "cpu":
        return False
    return config.device == "cuda" or any(machine.gpus for machine in machines)


def with_threads(
    config: EngineConfig, trainers: Sequence[Slot], samplers: Sequence[Slot], machines: Sequence[Machine]
) -> EngineConfig:
    """The settings with the cores of the fullest machine divided among its processes, where no threads were set."""
    if config.threads:
        return config
    slots = [slot.machine for slot in (*trainers, *samplers)]
    shares = [machine.cpus // count for machine in machines if (count := slots.count(machine.name))]
    return config.model_copy(update={"threads": max(1, min(shares, default=1))})


def plan(
    config: EngineConfig,
    trainers: Sequence[Slot],
    samplers: Sequence[Slot],
    machines: Sequence[Machine],
    *,
    is_sharded: bool = False,
) -> Iterator[str]:
    """Lines that say, before anything is loaded, which processes will run where, and what does not fit.

    `is_sharded`: whether the trainers share the base model's layers out.
    """
    weights = weight_bytes(config.source)
    size = f", {weights / 1e9:.1f} GB of weight files{'' if is_sharded else ' each'}" if weights else ""
    yield f"Plan for {config.source}: {len(trainers)} training and {counted(len(samplers), 'sampling process')}{size}"
    by_name = {machine.name: machine for machine in machines}
    for name in dict.fromkeys(slot.machine for slot in (*trainers, *samplers)):
        slots = [slot for slot in (*trainers, *samplers) if slot.machine == name]
        machine = by_name.get(name)
        hardware = (
            f", {counted(machine.cpus, 'core')}, {machine.memory_bytes / 1e9:.0f} GB" if machine is not None else ""
        )
        yield f"  {name} ({slots[0].host}{hardware})"
        if machine is not None and not slots[0].gpus and len(slots) * weights > machine.memory_bytes:
            yield f"    {counted(len(slots), 'process')}: the weights alone take more than the machine's memory"
        for slot in slots:
            device = f"GPU {', '.join(slot.gpus)}" if slot.gpus else f"CPU, {counted(config.threads, 'thread')}"
            parts = len(trainers) if is_sharded and slot in trainers else max(1, len(slot.gpus))
            room = machine.gpu_bytes if machine is not None and slot.gpus and config.quantize == "none" else 0
            if room and weights / parts > room:
                device += f"; does not fit: {weights / parts / 1e9:.1f} GB of weights on a GPU of {room / 1e9:.1f} GB"
            yield f"    {slot.name}: {device}"
    homes = len({slot.machine for slot in trainers})
    if is_sharded and homes > 1:
        yield f"  The base model is sharded over {homes} machines: each pass sends every layer between them, twice"


def weight_bytes(source: str) -> int:
    """Size of the weight files of a model's folder; 0 for a model that is not a folder of this machine."""
    folder = Path(source).expanduser()
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
