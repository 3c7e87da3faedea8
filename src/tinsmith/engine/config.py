"""Settings of an engine. `process.build` creates an engine from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tinsmith.settings import Settings

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


Recompute = Literal["auto", "always", "never"]
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


class EngineConfig(Settings):
    """One base model on one device."""

    source: str = DEFAULT_MODEL
    """Hub id, folder or GGUF file."""

    kind: Literal["torch", "fake"] = "torch"
    """`torch` runs a model; `fake` computes numbers without one, for tests without torch."""

    sampler: Literal["torch", "vllm"] = "torch"
    """Sampling backend: `torch` (built in, shares the trainer's weights) or `vllm` (a separate vLLM process)."""

    vllm: VllmConfig = VllmConfig()
    """Used with `sampler: vllm`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the base model; auto is bfloat16 where the hardware supports it natively, else float32. Adapters and
    optimizer state are float32."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto is a GPU if there is one."""

    threads: int = 0
    """CPU threads for tensor operations; 0 is one for each core."""

    pass_tokens: PassTokens = "auto"
    """Packed tokens in one training micro-batch, not counting what its rows share; bounds the memory of activations.
    Auto is what fits into a quarter of the memory that is free once the model is loaded: at most 1,024 on a CPU, 8,192
    on a GPU."""

    recompute: Recompute = "auto"
    """Activation checkpointing: recompute a layer's activations in the backward instead of saving them, for a third
    more compute and a tenth of the memory. Auto does so for rows of more than twice a micro-batch's tokens."""

    cache_tokens: int = 32768
    """Capacity of the sampler's KV cache in tokens; requests beyond it wait."""

    sharing: Literal["latency", "throughput"] = "throughput"
    """How training and sampling share the device: `latency` favours time to next token, `throughput` total tokens per
    second."""
