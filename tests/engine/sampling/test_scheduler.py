"""Admission of jobs: limits of the pass, of the cache and of the step, from sizes only."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tinsmith.engine.sampling.capacity import MAX_SEQUENCES, reserved_tokens
from tinsmith.engine.sampling.scheduler import BUSY_PREFILL_FACTOR, IDLE_PREFILL_FACTOR, JobSize, Load, Scheduler

BUSY = Load(sequences=1, cache_tokens=0)


def scheduler(pass_tokens: int = 1000, cache_tokens: int = 10**6, *, may_share_prompts: bool = True) -> Scheduler:
    return Scheduler(pass_tokens=pass_tokens, cache_tokens=cache_tokens, may_share_prompts=may_share_prompts)


def job(prompt_tokens: int = 100, sequences: int = 1, *, cached_tokens: int = 0, max_tokens: int = 16) -> JobSize:
    return JobSize(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, sequences=sequences, max_tokens=max_tokens)


def test_all_jobs_are_admitted_within_the_limits() -> None:
    assert scheduler().admit([job()] * 5, BUSY) == 5
    assert scheduler().admit([], Load()) == 0


def test_pass_limit_counts_uncached_prompt_tokens() -> None:
    assert scheduler(pass_tokens=125).admit([job()] * 5, BUSY) == 2
    assert scheduler(pass_tokens=125).admit([job(cached_tokens=50)] * 9, BUSY) == 5


def test_pass_limit_is_higher_when_nothing_runs() -> None:
    assert scheduler(pass_tokens=100).admit([job()] * 9, Load()) == IDLE_PREFILL_FACTOR
    assert scheduler(pass_tokens=100).admit([job()] * 9, BUSY) == BUSY_PREFILL_FACTOR < IDLE_PREFILL_FACTOR


def test_prompt_longer_than_a_pass_is_admitted_alone() -> None:
    assert scheduler(pass_tokens=64).admit([job(900), job(900)], BUSY) == 1


def test_full_cache_blocks_jobs_until_sequences_end() -> None:
    size = reserved_tokens(100, 1, 16, shared=False)
    assert scheduler(cache_tokens=3 * size).admit([job()] * 9, Load()) == 3
    assert scheduler(cache_tokens=3 * size).admit([job()] * 9, Load(sequences=1, cache_tokens=2 * size)) == 1
    assert scheduler(cache_tokens=3 * size).admit([job()] * 9, Load(sequences=1, cache_tokens=3 * size)) == 0


def test_step_limit_counts_sequences_of_all_jobs() -> None:
    assert scheduler().admit([job(sequences=MAX_SEQUENCES // 2)] * 3, Load()) == 2
    assert scheduler().admit([job(sequences=2)] * 3, Load(sequences=MAX_SEQUENCES - 3)) == 1


@pytest.mark.parametrize("size", [job(100, MAX_SEQUENCES + 1), job(10**7)])
def test_job_beyond_the_limits_runs_alone(size: JobSize) -> None:
    assert scheduler().admit([size, job()], Load()) == 1
    assert scheduler().admit([size, job()], BUSY) == 0


def test_jobs_are_admitted_in_order_of_arrival() -> None:
    """A small job does not overtake a large one that must wait."""
    assert scheduler(pass_tokens=250).admit([job(400), job(200), job(20)], BUSY) == 1


@pytest.mark.parametrize("prompt", [100, 900])
def test_states_of_each_sequence_are_reserved(prompt: int) -> None:
    group = replace(job(prompt, 3), state_tokens=200)
    size = reserved_tokens(prompt, 3, 16, shared=prompt == 900) + 3 * 200
    assert scheduler(cache_tokens=2 * size).admit([group] * 3, Load()) == 2
    assert scheduler(cache_tokens=2 * size - 1).admit([group] * 3, Load()) == 1


def test_shared_prompt_reserves_its_tokens_once() -> None:
    group = job(900, 8, max_tokens=30)
    cache_tokens = 2 * (1024 + 8 * 64)
    assert scheduler(cache_tokens=cache_tokens).admit([group] * 3, Load()) == 2
    assert scheduler(cache_tokens=cache_tokens, may_share_prompts=False).admit([group] * 3, Load()) == 1


def test_prompts_are_shared_by_long_or_large_groups_only() -> None:
    assert scheduler().shares_prompt(900, 3)
    assert not scheduler().shares_prompt(900, 2)
    assert not scheduler().shares_prompt(100, 3)
    assert not scheduler(may_share_prompts=False).shares_prompt(900, 8)


def test_queue_is_read_only_as_far_as_necessary() -> None:
    read: list[int] = []

    def waiting() -> Iterator[JobSize]:
        for number in range(100):
            read.append(number)
            yield job()

    assert scheduler(pass_tokens=125).admit(waiting(), BUSY) == 2
    assert read == [0, 1, 2]


def test_one_job_at_a_time() -> None:
    """Deterministic mode. Without it the other jobs of the batch change the shapes of products."""
    alone = Scheduler(pass_tokens=1000, cache_tokens=10**6, may_share_prompts=True, one_at_a_time=True)
    assert alone.admit([job()] * 5, Load()) == 1
    assert alone.admit([job()] * 5, BUSY) == 0
    assert alone.admit([], Load()) == 0
