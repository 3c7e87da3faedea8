"""Which waiting jobs join the running batch next. Arithmetic on sizes; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from tinsmith.engine.sampling.capacity import MAX_SEQUENCES, paged_tokens, reserved_tokens, shares_prompt

IDLE_PREFILL_FACTOR = 3
"""Micro-batches' worth of prompt tokens in a prefill pass while no sequence is running: nothing waits for the pass, and
without a backward it takes about as long as a micro-batch."""
BUSY_PREFILL_FACTOR = 2
"""The same while running sequences wait for the pass. More and smaller passes would mean more decoding steps of few
sequences between them."""

PAGE_SHARE = (3, 4)
"""Of the cache tokens for the pages of running sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """Size of a waiting job."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompt: tokens that the prefix cache holds."""
    sequences: int
    max_tokens: int
    """Limit for each sequence."""
    state_tokens: int = 0
    """Cache tokens that the recurrent states of a sequence are worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the running batch takes."""

    sequences: int = 0
    cache_tokens: int = 0
    """Capacity of the cache rows in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """Admits jobs in order of arrival, within the limits of a prefill pass, the KV cache and a decoding step."""

    pass_tokens: int
    """Prompt tokens in a prefill pass."""
    cache_tokens: int
    may_share_prompts: bool
    """Whether sequences may read one prompt from a shared row: on a CPU."""
    has_pages: bool = False
    """Whether rows are in pages, which sequences of one prompt share anyway."""
    one_at_a_time: bool = False
    """Run one job at a time, so that no other job changes the shapes of its products."""

    @property
    def row_tokens(self) -> int:
        """Cache tokens for running sequences. The memory of pages is never given back to the prefix cache, which keeps
        the rest of the cache tokens for itself."""
        return self.cache_tokens * PAGE_SHARE[0] // PAGE_SHARE[1] if self.has_pages else self.cache_tokens

    def admit(self, waiting: Iterable[JobSize], load: Load) -> int:
        """Number of jobs, from the beginning of `waiting`, to prefill in one pass. At least one when nothing runs, so
        that a job beyond the limits is not stuck. `waiting` is read only as far as necessary."""
        if self.one_at_a_time:
            return 0 if load.sequences else len(list(islice(waiting, 1)))
        pass_limit = self.pass_tokens * (BUSY_PREFILL_FACTOR if load.sequences else IDLE_PREFILL_FACTOR)
        prefill_tokens, cache_tokens, sequences = 0, load.cache_tokens, load.sequences
        admitted = 0
        for job in waiting:
            prefill_tokens += job.prompt_tokens - job.cached_tokens
            cache_tokens += self._reserve(job)
            sequences += job.sequences
            pass_full = prefill_tokens > pass_limit
            batch_full = cache_tokens > self.row_tokens or sequences > MAX_SEQUENCES
            if (admitted and pass_full) or (batch_full and (admitted or load.sequences)):
                break
            admitted += 1
        return admitted

    def shares_prompt(self, prompt_tokens: int, sequences: int) -> bool:
        """Whether sequences of one prompt read it from a shared row."""
        return self.may_share_prompts and not self.has_pages and shares_prompt(prompt_tokens, sequences)

    def _reserve(self, job: JobSize) -> int:
        if self.has_pages:
            return paged_tokens(job.prompt_tokens, job.sequences, job.max_tokens)
        shared = self.shares_prompt(job.prompt_tokens, job.sequences)
        return reserved_tokens(
            job.prompt_tokens, job.sequences, job.max_tokens, shared=shared, state_tokens=job.state_tokens
        )
