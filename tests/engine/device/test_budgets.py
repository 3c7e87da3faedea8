"""How often a GPU would be waited for: few times a micro-batch and a decoding step, whatever is in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.architectures import save_tiny
from tests.engine.device import programs

MICRO_BATCH, DECODING_STEP = 4, 2
"""Waits at most."""
STEPS = 8
NUMBER_OF_EXPERTS = {"qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers."""
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


def outside_of_lora(places: Counter[str]) -> Counter[str]:
    """Without those of the adapters and the head."""
    return Counter({place: count for place, count in places.items() if not place.startswith("engine/lora/")})


@pytest.mark.parametrize(("lengths", "tenants"), [((9, 30), 1), ((9, 30, 3, 14, 22, 5), 1), ((9, 30), 5)])
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo"])
def test_losses_wait_twice(stand_in: Any, llama: Path, loss_fn: str, lengths: Sequence[int], tenants: int):
    counts = stand_in(programs.training_counts, llama, lengths, tenants, loss_fn)
    assert outside_of_lora(counts.reads).total() <= 2, counts.reads
    assert outside_of_lora(counts.uploads).total() <= 14, counts.uploads


@pytest.mark.parametrize(("lengths", "tenants"), [((9, 30), 1), ((9, 30, 3, 14, 22, 5), 5)])
def test_micro_batch_waits_rarely(stand_in: Any, llama: Path, lengths: Sequence[int], tenants: int):
    counts = stand_in(programs.training_counts, llama, lengths, tenants, "ppo")
    assert counts.reads.total() <= MICRO_BATCH, counts.reads


RULES = ({}, {"top_k": 40, "top_p": 0.9}, {"topk_sample_logprobs": 5, "temperature": 0.5, "top_p": 0.8})


@pytest.mark.parametrize("rule", RULES, ids=["plain", "restricted", "likeliest"])
@pytest.mark.parametrize(("sequences", "versions"), [(1, 1), (20, 3)])
def test_decoding_step_waits_rarely(stand_in: Any, llama: Path, sequences: int, versions: int, rule: dict[str, Any]):
    counts = stand_in(programs.decoding_counts, llama, sequences, versions, STEPS, **rule)
    assert counts.reads.total() <= DECODING_STEP * STEPS, counts.reads


def test_prefill_costs_the_same_for_any_conversations(stand_in: Any, llama: Path):
    few, many = (stand_in(programs.prefill_counts, llama, conversations) for conversations in (3, 40))
    assert few.launches == many.launches
    assert (few.reads, few.uploads) == (many.reads, many.uploads)
    assert many.reads.total() <= MICRO_BATCH


@pytest.mark.parametrize("rule", RULES, ids=["plain", "restricted", "likeliest"])
def test_step_over_pages_waits_once_and_uploads_before(stand_in: Any, llama: Path, rule: dict[str, Any]):
    """The part that becomes a graph takes nothing from the host and gives it nothing; the results are one read."""
    counts, within, _ = stand_in(programs.paged_decoding_counts, llama, 20, 3, steps=STEPS, **rule)
    assert counts.reads.total() <= STEPS, counts.reads
    assert (within.reads.total(), within.uploads.total()) == (0, 0), (within.reads, within.uploads)
    assert counts.uploads.total() <= 2 * STEPS, counts.uploads


def test_step_over_pages_is_the_same_for_any_adapters(stand_in: Any, llama: Path):
    (_, few, steps), (_, many, same) = (
        stand_in(programs.paged_decoding_counts, llama, 8, versions, steps=STEPS) for versions in (1, 8)
    )
    assert steps == same
    assert few.launches == many.launches


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_mixtures_wait_as_rarely(stand_in: Any, kind: str, tmp_path: Path):
    few, many = (save_tiny(kind, tmp_path / str(count), **{NUMBER_OF_EXPERTS[kind]: count}) for count in (8, 32))
    trained = [
        stand_in(programs.training_counts, folder, (9, 30), 3, "ppo", dtype="bfloat16") for folder in (few, many)
    ]
    assert trained[0].launches == trained[1].launches
    assert trained[1].reads.total() <= MICRO_BATCH, trained[1].reads
    sampled = stand_in(programs.decoding_counts, many, 5, 3, STEPS, "bfloat16")
    assert sampled.reads.total() <= DECODING_STEP * STEPS, sampled.reads
