"""Settings of engines. EngineConfig, ServeConfig and the `service` section of a run file inherit them."""

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
    """Settings of the vLLM server, which runs in its own venv and process."""

    python: Path | None = None
    """Python interpreter of vLLM's venv. Default: .venv-vllm/bin/python in the working directory, else the interpreter
    of the `vllm` command on PATH."""

    rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 32
    """Maximum LoRA rank of the adapters that are sampled from; vLLM reserves memory for it."""

    adapters: int = Field(default=8, ge=1)
    """Maximum number of adapter versions in one decoding step; vLLM reserves memory for each. Samples from further
    versions wait."""

    memory: float = Field(default=0.3, gt=0, lt=1)
    """Fraction of each GPU's memory, or of the machine's memory without a GPU, for vLLM's weights, adapters and KV
    cache."""

    devices: str = ""
    """CUDA_VISIBLE_DEVICES of vLLM. Empty: inherit it from this process."""

    args: tuple[str, ...] = ()
    """Additional options of the vLLM server, such as [--tensor-parallel-size, 2]."""


class DeviceOptions(Settings):
    """Device settings of base models."""

    dtype: Dtype = "auto"
    """Data type of the base models. `auto` picks bfloat16 where the hardware supports it natively (GPUs; CPUs with
    AVX512-BF16 or AMX), else float32. Adapters and optimizer state are float32."""

    device: Device = "auto"
    """Device of the base models. `auto` picks a GPU if there is one."""

    threads: int = Field(default=0, ge=0)
    """CPU threads for tensor operations; 0 uses one per core."""


class EngineOptions(DeviceOptions):
    """Training and sampling settings of an engine."""

    sampler: Sampler = "torch"
    """Sampling backend: `torch` (built in, shares the trainer's weights) or `vllm` (a separate vLLM process)."""

    vllm: VllmConfig = VllmConfig()
    """Settings of the vLLM server; used with `sampler: vllm`."""

    pass_tokens: PassTokens = "auto"
    """Packed tokens in one training micro-batch; limits the memory of activations. Tokens of a shared prefix count
    once. `auto` uses what fits into a quarter of the memory that is free after the model is loaded, at most 1,024 on a
    CPU and 8,192 on a GPU."""

    recompute: Recompute = "auto"
    """Activation checkpointing: recompute the activations of a layer in the backward pass instead of storing them, for
    a third more compute and a tenth of the memory. `auto` applies it to rows longer than two micro-batches."""

    cache_tokens: int = Field(default=32768, ge=1)
    """Capacity of the sampler's KV cache in tokens; requests that do not fit wait."""

    sharing: Sharing = "throughput"
    """Device scheduling: `latency` favours time to next token, `throughput` total tokens per second."""
