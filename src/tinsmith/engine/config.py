"""What an engine is made from; `build.py` makes it, `process.py` gives it a process of its own."""

from __future__ import annotations

from typing import Literal

from tinsmith.settings import Settings

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


class EngineConfig(Settings):
    """One base model on one device."""

    source: str = DEFAULT_MODEL
    """A hub id, a folder or a GGUF file."""

    kind: Literal["torch", "fake"] = "torch"
    """`fake` answers in arithmetic instead of a model: for tests without torch."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the base model; auto is bfloat16 where the hardware is fast at it. Adapters and moments are float32."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the tensors live; auto is a GPU if there is one."""

    threads: int = 0
    """CPU threads for tensor work; 0 is one for each core."""

    pass_tokens: int = 1024
    """Packed tokens in one micro-batch of training; bounds the memory that activations take."""

    cache_tokens: int = 32768
    """Tokens that the sampler's cache may hold; requests beyond it wait."""

    sharing: Literal["latency", "throughput"] = "throughput"
    """How training and sampling take turns on the device: few waits for a token, or most tokens of both together."""
