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
Quantize = Literal["none", "4bit"]
ModelPath = Literal["auto", "fast", "general"]
PassTokens = Literal["auto"] | Annotated[int, Field(ge=1)]
CacheTokens = Literal["auto"] | Annotated[int, Field(ge=1)]
VllmMemory = Literal["auto"] | Annotated[float, Field(gt=0, lt=1)]
VllmSleep = Literal["auto"] | bool
VllmContext = Literal["auto"] | Annotated[int, Field(ge=1)]
CPU_CACHE_TOKENS = 32768
"""Capacity of a KV cache with `cache_tokens: auto` on a CPU."""


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

    memory: VllmMemory = "auto"
    """Fraction of each GPU's memory, or of the machine's memory without a GPU, for vLLM's weights, adapters and KV
    cache. `auto`: on the trainer's GPU what the memory plan leaves it (`tinsmith serve --plan`), 0.9 of GPUs of its
    own, 0.3 of a machine without a GPU."""

    context: VllmContext = "auto"
    """Longest row that vLLM samples, with its prompt; longer ones are sampled by the trainer. vLLM starts only if its
    KV cache holds one such row. `auto`: the model's context, or on a GPU what fits of it."""

    sleep: VllmSleep = "auto"
    """vLLM's sleep mode, on the trainer's GPU: while the trainer computes, vLLM moves its weights to the machine's
    memory, drops its KV cache and pauses its requests, so that the same memory serves both in turns. `auto`: where
    trainer and vLLM do not fit beside each other, or only with micro-batches under 512 tokens."""

    devices: str = ""
    """CUDA_VISIBLE_DEVICES of vLLM. Empty: inherit it from this process."""

    args: tuple[str, ...] = ()
    """Additional options of the vLLM server, such as [--tensor-parallel-size, 2]."""

    @property
    def gpus(self) -> int:
        """GPUs that hold a part of the model each, by `args`."""
        for name, value in zip(self.args, self.args[1:], strict=False):
            if name in ("--tensor-parallel-size", "-tp") and value.isdecimal():
                return int(value)
        joined = [arg.partition("=")[2] for arg in self.args if arg.startswith("--tensor-parallel-size=")]
        return int(joined[0]) if joined and joined[0].isdecimal() else 1


class DeviceOptions(Settings):
    """Device settings of base models."""

    dtype: Dtype = "auto"
    """Data type of the base models. `auto` picks bfloat16 where the hardware multiplies it natively (GPUs; CPUs with
    AVX512-BF16 or AMX), else float32; on CPUs that multiply float32 faster than bfloat16 (Intel's with AMX switched
    off), float32 for models whose weights then take at most an eighth of the memory. Adapters and optimizer state are
    float32."""

    device: Device = "auto"
    """Device of the base models. `auto` picks a GPU if there is one."""

    threads: int = Field(default=0, ge=0)
    """CPU threads for tensor operations; 0 uses one per core."""


class EngineOptions(DeviceOptions):
    """Training and sampling settings of an engine."""

    quantize: Quantize = "none"
    """Quantization of the base models. `4bit`: the projections in bitsandbytes' NF4, for a quarter of their bfloat16
    memory; embeddings, output head, routers and fused experts stay in `dtype`. Adapters and optimizer state are
    float32."""

    check_memory: bool = True
    """Refuse a base model that does not fit into the free memory before anything is read."""

    sampler: Sampler = "torch"
    """Sampling backend: `torch` (built in, shares the trainer's weights) or `vllm` (a separate vLLM process)."""

    vllm: VllmConfig = VllmConfig()
    """Settings of the vLLM server; used with `sampler: vllm`."""

    path: ModelPath = "auto"
    """How the base model is computed: `fast` (packed trees and kernels of this engine, for the architectures that they
    support), `general` (transformers' own modules, for every architecture, several times slower), or `auto`: fast where
    it is supported, else general."""

    pass_tokens: PassTokens = "auto"
    """Packed tokens in one training micro-batch; limits the memory of activations. Tokens of a shared prefix count
    once. A CPU with two threads or more computes two at the same time. `auto`: on a CPU what fits into a quarter of the
    memory that is free after the model is loaded, at most 1,024; on a GPU what the memory plan leaves it
    (`tinsmith serve --plan`), at most 8,192."""

    recompute: Recompute = "auto"
    """Activation checkpointing: recompute the activations of a layer in the backward pass instead of storing them, for
    a third more compute and a tenth of the memory. `auto` applies it to rows longer than two micro-batches where
    these are not computed in pieces: on GPUs, with recurrent layers, and with experts."""

    cache_tokens: CacheTokens = "auto"
    """Capacity of the sampler's KV cache in tokens; requests that do not fit wait. `auto` is 32,768 on a CPU, or what
    a quarter of the free memory holds if that is less, and on a GPU what the memory plan leaves it (`tinsmith serve
    --plan`)."""

    engine_timeout_s: float = Field(default=120.0, ge=2)
    """Seconds without progress, while requests run, after which an engine is killed and started again. Progress is each
    matrix product, and each piece of a file that is read or written, so that long rows on a slow CPU are safe."""

    sharing: Sharing = "throughput"
    """Device scheduling: `latency` favours time to next token, `throughput` total tokens per second."""

    deterministic: bool = False
    """The same requests give the same bits, whoever else sends requests: each training request is packed by itself, and
    samples are drawn for one request at a time, without the prefix cache. Slower, most of all for many small requests.
    The bits are those of one machine, version and number of threads; `tinsmith prove` checks them."""
