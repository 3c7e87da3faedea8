"""What an engine is made from; `build.py` makes it, `process.py` gives it a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tinsmith.settings import Settings

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


Recompute = Literal["auto", "always", "never"]
PassTokens = Literal["auto"] | Annotated[int, Field(ge=1)]


class VllmConfig(Settings):
    """How a vLLM that samples is started, in its own venv and process."""

    python: Path | None = None
    """Python of vLLM's venv; without it: .venv-vllm/bin/python here, else that of the `vllm` command on PATH."""

    rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 32
    """The largest rank of an adapter that is to be sampled from; memory is set aside for it."""

    adapters: int = Field(default=8, ge=1)
    """Adapter versions that one step may mix; memory is set aside for them. Samples of further ones wait."""

    memory: float = Field(default=0.3, gt=0, lt=1)
    """Share of each GPU's memory (without a GPU: of the machine's) that its weights, adapters and cache may take."""

    devices: str = ""
    """The GPUs it sees, as CUDA_VISIBLE_DEVICES names them; empty: those that this process sees."""

    args: tuple[str, ...] = ()
    """Further options of vLLM's own server, as [--tensor-parallel-size, 2]."""


class EngineConfig(Settings):
    """One base model on one device."""

    source: str = DEFAULT_MODEL
    """A hub id, a folder or a GGUF file."""

    kind: Literal["torch", "fake"] = "torch"
    """`fake` answers in arithmetic instead of a model: for tests without torch."""

    sampler: Literal["torch", "vllm"] = "torch"
    """Who samples: this engine with the weights that it trains, or a vLLM beside it with weights of its own."""

    vllm: VllmConfig = VllmConfig()
    """Read where sampler is vllm."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the base model; auto is bfloat16 where the hardware is fast at it. Adapters and moments are float32."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the tensors live; auto is a GPU if there is one."""

    threads: int = 0
    """CPU threads for tensor work; 0 is one for each core."""

    pass_tokens: PassTokens = "auto"
    """Packed tokens in one micro-batch of training, and what its rows share on top; bounds the memory that activations
    take. Auto is what fits a quarter of the memory that is free once the model is loaded: at most 1,024 on a CPU, 8,192
    on a GPU."""

    recompute: Recompute = "auto"
    """Whether a layer's activations are computed again in the backward instead of kept: a third more work, a tenth of
    the memory. Auto does it for rows of more than twice a micro-batch's tokens."""

    cache_tokens: int = 32768
    """Tokens that the sampler's cache may hold; requests beyond it wait."""

    sharing: Literal["latency", "throughput"] = "throughput"
    """How training and sampling take turns on the device: few waits for a token, or most tokens of both together."""
