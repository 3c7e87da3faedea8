"""How the processes of a sampler pool are started: in a slot, which may be on another machine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from tinsmith.engine.base import ModelCard
from tinsmith.engine.cluster.replica import Launch, SamplerProcess
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.client import ServedEngine, start_engine
from tinsmith.engine.processes.slots import Program, Slot
from tinsmith.engine.processes.supervisor import wait_for_end
from tinsmith.engine.vllm.worker import VllmStart

VLLM_WORKER = Program(module="tinsmith.engine.vllm.worker")


def torch_in_slot(slot: Slot, config: EngineConfig, payload: bytes = b"") -> Launch:
    """A whole torch engine, of which only the sampler is used. `payload`: of its launch token (`cached_engine`)."""
    settings = config.model_copy(update={"sampler": "torch", "part": "sampling", "shards": 1})
    generations = itertools.count(1)

    async def launch() -> SamplerProcess:
        engine = await start_engine(slot, settings, config.source, next(generations), payload=payload)
        return watched(engine, config.engine_timeout_s, slot.name)

    return launch


def vllm_in_slot(
    slot: Slot, config: EngineConfig, card: ModelCard, zero_adapter: Mapping[str, bytes], payload: bytes = b""
) -> Launch:
    """A vLLM server, over all GPUs of the slot. `card` is the trainer's.

    `zero_adapter`: on a CPU, the files that `write_zero_adapter` has written. `payload`: of its launch token.
    """
    start = VllmStart(config=for_slot(config, slot.gpus), card=card, zero_adapter=zero_adapter)
    generations = itertools.count(1)

    async def launch() -> SamplerProcess:
        engine = await start_engine(slot, start, config.source, next(generations), VLLM_WORKER, payload)
        return watched(engine, config.engine_timeout_s, slot.name)

    return launch


def for_slot(config: EngineConfig, gpus: tuple[str, ...]) -> EngineConfig:
    """Settings with vLLM on these GPUs, tensor parallel over several; those of the settings without GPUs."""
    if not gpus:
        return config
    args = config.vllm.args
    if len(gpus) > 1:
        args = (*args, "--tensor-parallel-size", str(len(gpus)))
    vllm = config.vllm.model_copy(update={"devices": ",".join(gpus), "args": args})
    return config.model_copy(update={"vllm": vllm})


def watched(engine: ServedEngine, timeout_s: float, name: str) -> SamplerProcess:
    """An engine as a process of the pool; it is killed after `timeout_s` without progress while it samples."""
    return SamplerProcess(engine=engine, ended=lambda: wait_for_end(engine, timeout_s, name))
