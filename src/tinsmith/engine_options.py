"""Settings of engines, declared once: engines, the service, the service of a run and `tinsmith serve` derive theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tinsmith.settings import Settings

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
Sampler = Literal["torch", "vllm"]
Recompute = Literal["auto", "always", "never"]
Sharing = Literal["latency", "throughput"]
PassTokens = Literal["auto"] | Annotated[int, Field(ge=1)]


class VllmConfig(Settings):
    """How the vLLM server that samples is started, in its own venv and process."""

    python: Path | None = None
    """Python of vLLM's venv. Default: .venv-vllm/bin/python in the working directory, else that of the `vllm`
    command on PATH."""

    rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 32
    """Largest rank of an adapter to sample from; vLLM reserves memory for it."""

    adapters: int = Field(default=8, ge=1)
    """Adapter versions in one step; vLLM reserves memory for them. Samples of further versions wait."""

    memory: float = Field(default=0.3, gt=0, lt=1)
    """Share of each GPU's memory (without a GPU: of the machine's) for vLLM's weights, adapters and KV cache."""

    devices: str = ""
    """CUDA_VISIBLE_DEVICES of vLLM; empty: that of this process."""

    args: tuple[str, ...] = ()
    """Further options of vLLM's server, such as [--tensor-parallel-size, 2]."""


class DeviceOptions(Settings):
    """How base models run on a device."""

    dtype: Dtype = "auto"
    """Data type of the base models. `auto` picks bfloat16 where the hardware supports it natively (GPUs; CPUs with
    AVX512-BF16 or AMX), else float32. Adapters and optimizer state are float32."""

    device: Device = "auto"
    """Device of the tensors. `auto` picks a GPU if there is one."""

    threads: int = Field(default=0, ge=0)
    """CPU threads for tensor operations; 0 is one for each core."""


class EngineOptions(DeviceOptions):
    """How an engine trains and samples."""

    sampler: Sampler = "torch"
    """Sampling backend: `torch` (built in, shares the trainer's weights) or `vllm` (a separate vLLM process)."""

    vllm: VllmConfig = VllmConfig()
    """How vLLM is started; used with `sampler: vllm`."""

    pass_tokens: PassTokens = "auto"
    """Packed tokens in one training micro-batch, not counting what its rows share; bounds the memory of activations.
    Auto is what fits into a quarter of the memory that is free once the model is loaded: at most 1,024 on a CPU, 8,192
    on a GPU."""

    recompute: Recompute = "auto"
    """Activation checkpointing: recompute a layer's activations in the backward pass instead of storing them, for a
    third more compute and a tenth of the memory. `auto` does so for rows longer than twice a micro-batch."""

    cache_tokens: int = Field(default=32768, ge=1)
    """Capacity of the sampler's KV cache in tokens; requests beyond it wait."""

    sharing: Sharing = "throughput"
    """Device scheduling: `latency` favours time to next token, `throughput` total tokens per second."""
