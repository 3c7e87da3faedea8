"""Figures that the simulation takes as given: engines as arithmetic, and the CPU time of the service.

GPU figures are of a 4B model on one GPU of the H100 class, rounded, and assumed: none was at hand. CPU times of the API
process were measured (docs/serve/cluster.md). A simulation says how the service divides the work, not how fast a GPU
is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Seconds, unless a name says otherwise."""

    step_s: float = 0.012
    """A decoding step without sequences: reading the weights."""
    step_per_sequence_s: float = 0.000_053
    """With 256 sequences: 10,000 tokens a second."""
    prefill_per_token_s: float = 0.000_02
    cache_tokens: int = 400_000
    """KV cache of a replica."""
    train_per_token_s: float = 0.000_04
    """A packed token, forward and backward: 25,000 a second."""
    train_pass_s: float = 0.05
    """A pass of a group, whatever its size."""
    optimizer_s: float = 0.08
    """Sum of gradients over the ranks (264 MB at 100 Gb/s) and AdamW."""
    publish_s: float = 0.3
    """From the captured version to its folder in the store."""
    attach_s: float = 0.2
    """A replica fetches and loads a version."""
    notice_s: float = 2.0
    load_s: float = 60.0
    """Start of a process and load of the base model."""

    api_sample_ms: float = 1.05
    api_sample_per_prompt_token_ms: float = 0.000_07
    api_answer_token_ms: float = 0.000_5
    """Encoding of an answer: assumed."""
    api_step_ms: float = 4.45
    api_pass_ms: float = 3.9
    api_pass_per_token_ms: float = 0.000_45
    """Fitted to passes of 8 x 300 tokens (5.0 ms) and 64 x 300 (12.75 ms)."""

    def decode_step(self, sequences: int) -> float:
        """Time of a decoding step."""
        return self.step_s + self.step_per_sequence_s * sequences
