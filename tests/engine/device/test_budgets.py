"""How often a GPU would be waited for: few times a micro-batch and a decoding step, whatever is in them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.architectures import save_tiny
from tests.engine.device import programs
from tests.engine.device.programs import Decoding, Training
from tests.engine.device.stand_in import Counts

MICRO_BATCH, DECODING_STEP = 4, 2
"""Waits at most."""
STEPS = 8
NUMBER_OF_EXPERTS = {"qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers."""
    return save_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


def outside_of_lora(places: Counter[str]) -> Counter[str]:
    """Without those of the adapters and the head."""
    return Counter({place: count for place, count in places.items() if not place.startswith("engine/lora/")})


FEW, MORE = (9, 30), (9, 30, 3, 14, 22, 5)
LOSSES = [
    Training(lengths, tenants, loss_fn)
    for loss_fn in ("cross_entropy", "ppo")
    for lengths, tenants in ((FEW, 1), (MORE, 1), (FEW, 5))
]
MICRO_BATCHES = [Training(FEW, 1, "ppo"), Training(MORE, 5, "ppo")]


@pytest.fixture(scope="module")
def trained(stand_in: Any, llama: Path) -> dict[Training, Counts]:
    """What each micro-batch costs."""
    cases = list({*LOSSES, *MICRO_BATCHES})
    return dict(zip(cases, stand_in(programs.training_counts, llama, cases), strict=True))


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_losses_wait_twice(trained: dict[Training, Counts], case: Training):
    counts = trained[case]
    assert outside_of_lora(counts.reads).total() <= 2, counts.reads
    assert outside_of_lora(counts.uploads).total() <= 14, counts.uploads


@pytest.mark.parametrize("case", MICRO_BATCHES, ids=str)
def test_micro_batch_waits_rarely(trained: dict[Training, Counts], case: Training):
    assert trained[case].reads.total() <= MICRO_BATCH, trained[case].reads


RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "restricted": {"top_k": 40, "top_p": 0.9},
    "likeliest": {"topk_sample_logprobs": 5, "temperature": 0.5, "top_p": 0.8},
}


@pytest.fixture(scope="module")
def decoded(stand_in: Any, llama: Path) -> dict[tuple[str, int], Counts]:
    """What the decoding steps cost, by the rule of the requests and the number of sequences."""
    cases = {
        (name, sequences): Decoding(sequences, versions, rule)
        for name, rule in RULES.items()
        for sequences, versions in ((1, 1), (20, 3))
    }
    return dict(zip(cases, stand_in(programs.decoding_counts, llama, list(cases.values()), STEPS), strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sequences", [1, 20])
def test_decoding_step_waits_rarely(decoded: dict[tuple[str, int], Counts], sequences: int, rule: str):
    counts = decoded[rule, sequences]
    assert counts.reads.total() <= DECODING_STEP * STEPS, counts.reads


def test_prefill_costs_the_same_for_any_conversations(stand_in: Any, llama: Path):
    few, many = (stand_in(programs.prefill_counts, llama, conversations) for conversations in (3, 40))
    assert few.launches == many.launches
    assert (few.reads, few.uploads) == (many.reads, many.uploads)
    assert many.reads.total() <= MICRO_BATCH


@pytest.mark.parametrize("rule", RULES)
def test_step_over_pages_waits_once_and_uploads_before(stand_in: Any, llama: Path, rule: str):
    """The part that becomes a graph takes nothing from the host and gives it nothing; the results are one read."""
    counts, within, _ = stand_in(programs.paged_decoding_counts, llama, Decoding(20, 3, RULES[rule]), STEPS)
    assert counts.reads.total() <= STEPS, counts.reads
    assert (within.reads.total(), within.uploads.total()) == (0, 0), (within.reads, within.uploads)
    assert counts.uploads.total() <= 2 * STEPS, counts.uploads


def test_step_over_pages_is_the_same_for_any_adapters(stand_in: Any, llama: Path):
    (_, few, steps), (_, many, same) = (
        stand_in(programs.paged_decoding_counts, llama, Decoding(8, versions), STEPS) for versions in (1, 8)
    )
    assert steps == same
    assert few.launches == many.launches


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_mixtures_wait_as_rarely(stand_in: Any, kind: str, tmp_path: Path):
    few, many = (
        save_tiny(kind, tmp_path / str(count), num_hidden_layers=2, **{NUMBER_OF_EXPERTS[kind]: count})
        for count in (8, 32)
    )
    case = Training(FEW, 3, "ppo")
    (first,), (second,) = (
        stand_in(programs.training_counts, folder, [case], dtype="bfloat16") for folder in (few, many)
    )
    assert first.launches == second.launches
    assert second.reads.total() <= MICRO_BATCH, second.reads
    (sampled,) = stand_in(programs.decoding_counts, many, [Decoding(5, 3)], STEPS, "bfloat16")
    assert sampled.reads.total() <= DECODING_STEP * STEPS, sampled.reads
