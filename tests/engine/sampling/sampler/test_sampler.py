"""Sampling against transformers' generate, against the trainer, and against the distribution itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.reference import Reference, plain_model
from tests.engine.sampling.helpers import PROMPT, assert_same_samples, sample_request, texts, trained_logprobs
from tests.models import CONTEXT, KINDS
from tinsmith.engine.base import LoraSpec


@pytest.fixture
def version(pair: Any, wait: Any) -> Any:
    """Creates a version with a random adapter; returns the engine, model id, version name and reference."""
    made = []

    def make(kind: str = "llama", lora: LoraSpec | None = None) -> Any:
        engine, model_id, oracle = pair(kind, lora)
        wait(engine.capture(model_id, f"{model_id}-version"))
        made.append((engine, f"{model_id}-version"))
        return engine, model_id, f"{model_id}-version", oracle

    yield make
    for engine, name in made:
        wait(engine.detach(name))


def next_logprobs(base: Path, prompt: Any = PROMPT) -> np.ndarray:
    """float64 [V]: logprobs of the token after the prompt, by plain transformers."""
    with torch.no_grad():
        logits = plain_model(base)(input_ids=torch.tensor([list(prompt)])).logits[0, -1]
    return logits.log_softmax(-1).numpy()


def generate(model: torch.nn.Module, prompt: Any, length: int) -> list[int]:
    """transformers' greedy continuation, without stops."""
    ids = torch.tensor([list(prompt)])
    settings = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "use_cache": True}
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=511, **settings
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers_generate(kind: str, version: Any, wait: Any, tiny: Any):
    engine, _, name, oracle = version(kind)
    for prompt in (PROMPT, PROMPT[:1], PROMPT * 4):
        for model, version_name in ((plain_model(tiny(kind), torch.float32), None), (oracle.model, name)):
            result = wait(engine.sample(sample_request(prompt, version=version_name, temperature=0.0, max_tokens=24)))
            assert 511 not in result.sequences[0].tokens  # the token that generate must not use
            assert result.sequences[0].tokens.tolist() == generate(model, prompt, 24)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_the_trainers(kind: str, version: Any, wait: Any):
    engine, model_id, name, _ = version(kind)
    base = f"{model_id}-base"
    wait(engine.create(base, LoraSpec(rank=1, seed=0)))
    for trained, version_name in ((base, None), (model_id, name)):
        result = wait(engine.sample(sample_request(version=version_name, num_samples=6, max_tokens=40)))
        gaps = [
            np.abs(s.logprobs - trained_logprobs(engine, wait, trained, PROMPT, s.tokens)) for s in result.sequences
        ]
        assert np.concatenate(gaps).mean() < 1e-5
        assert np.concatenate(gaps).max() < 1e-4
    wait(engine.drop(base))


@pytest.mark.parametrize(
    "flags", [(True, False, False), (False, True, False), (False, False, True)], ids=["attn", "mlp", "unembed"]
)
def test_sampler_applies_each_part_of_an_adapter(flags: Any, version: Any, wait: Any):
    lora = LoraSpec(rank=3, seed=1, train_attn=flags[0], train_mlp=flags[1], train_unembed=flags[2])
    engine, model_id, name, _ = version(lora=lora)
    (result,) = wait(engine.sample(sample_request(version=name))).sequences
    np.testing.assert_allclose(
        result.logprobs, trained_logprobs(engine, wait, model_id, PROMPT, result.tokens), atol=1e-4
    )


def test_temperature_scales_the_logprobs(engine: Any, tiny_llama: Path, wait: Any):
    raw = next_logprobs(tiny_llama)
    for temperature in (0.5, 0.7, 2.0):
        tempered = raw / temperature - np.log(np.exp(raw / temperature).sum())
        result = wait(engine.sample(sample_request(num_samples=32, max_tokens=1, temperature=temperature)))
        for sequence in result.sequences:
            assert sequence.logprobs[0] == pytest.approx(tempered[sequence.tokens[0]], abs=1e-5)


def test_greedy_logprobs_are_not_tempered(engine: Any, tiny_llama: Path, wait: Any):
    (result,) = wait(engine.sample(sample_request(temperature=0.0, max_tokens=1))).sequences
    assert result.logprobs[0] == pytest.approx(next_logprobs(tiny_llama).max(), abs=1e-5)


def first_tokens(engine: Any, wait: Any, number: int, **settings: Any) -> np.ndarray:
    """First tokens of `number` samples, from several requests with different seeds."""
    results = [
        wait(engine.sample(sample_request(num_samples=500, max_tokens=1, seed=seed, **settings)))
        for seed in range(number // 500)
    ]
    return np.array([sequence.tokens[0] for result in results for sequence in result.sequences])


def assert_drawn_from(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-square test over the likely tokens, the others in one bin; fails by chance once in ten thousand."""
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    likely = expected >= 8
    bins = np.append(counts[likely], counts[~likely].sum()), np.append(expected[likely], expected[~likely].sum())
    used = bins[1] > 0
    statistic, freedom = ((bins[0] - bins[1])[used] ** 2 / bins[1][used]).sum(), used.sum() - 1
    # Wilson and Hilferty: the cube root of chi-square over its degrees of freedom is nearly normal.
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    assert normal < 3.7, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_samples_follow_the_distribution(temperature: float, engine: Any, tiny_llama: Path, wait: Any):
    scaled = np.exp(next_logprobs(tiny_llama) / temperature)
    assert_drawn_from(first_tokens(engine, wait, 4000, temperature=temperature), scaled / scaled.sum())


def test_top_k_restricts_tokens_but_not_logprobs(engine: Any, tiny_llama: Path, wait: Any):
    raw = next_logprobs(tiny_llama)
    allowed = np.zeros_like(raw)
    allowed[np.argsort(raw)[-7:]] = np.exp(np.sort(raw)[-7:])
    assert_drawn_from(first_tokens(engine, wait, 2000, top_k=7), allowed / allowed.sum())
    for sequence in wait(engine.sample(sample_request(num_samples=20, max_tokens=1, top_k=7))).sequences:
        assert sequence.logprobs[0] == pytest.approx(raw[sequence.tokens[0]], abs=1e-5)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
def test_top_p_restricts_tokens_to_the_smallest_set(top_p: float, engine: Any, tiny_llama: Path, wait: Any):
    raw = next_logprobs(tiny_llama)
    order = np.argsort(raw)[::-1]
    reached = np.exp(raw[order]).cumsum()
    nucleus = order[: int(np.searchsorted(reached, top_p)) + 1]
    allowed = np.zeros_like(raw)
    allowed[nucleus] = np.exp(raw[nucleus])
    tokens = first_tokens(engine, wait, 2000, top_p=top_p)
    assert set(tokens) <= set(nucleus)
    if len(nucleus) > 1:
        assert_drawn_from(tokens, allowed / allowed.sum())
    for sequence in wait(engine.sample(sample_request(num_samples=20, max_tokens=1, top_p=top_p))).sequences:
        assert sequence.logprobs[0] == pytest.approx(raw[sequence.tokens[0]], abs=1e-5)


def test_top_k_of_one_equals_greedy(engine: Any, wait: Any):
    greedy = wait(engine.sample(sample_request(temperature=0.0)))
    narrow = wait(engine.sample(sample_request(top_k=1, num_samples=3)))
    for sequence in narrow.sequences:
        np.testing.assert_array_equal(sequence.tokens, greedy.sequences[0].tokens)


def test_end_of_sequence_stops_unless_stops_are_empty(engine: Any, wait: Any):
    stopped = wait(engine.sample(sample_request(num_samples=64, max_tokens=120, stop_tokens=None)))
    endless = wait(engine.sample(sample_request(num_samples=64, max_tokens=120, stop_tokens=())))
    reasons = {sequence.stop_reason for sequence in stopped.sequences}
    assert reasons == {"stop", "length"}
    for stopped_sequence, endless_sequence in zip(stopped.sequences, endless.sequences, strict=True):
        assert endless_sequence.stop_reason == "length"
        assert len(endless_sequence.tokens) == 120
        end = np.flatnonzero(endless_sequence.tokens == 2)
        length = end[0] + 1 if len(end) else 120
        assert stopped_sequence.stop_reason == ("stop" if len(end) else "length")
        np.testing.assert_array_equal(stopped_sequence.tokens, endless_sequence.tokens[:length])


def test_stop_token_ends_the_sequence_and_is_included(engine: Any, wait: Any):
    (greedy,) = wait(engine.sample(sample_request(temperature=0.0, max_tokens=20))).sequences
    stop = int(greedy.tokens[6])
    first = greedy.tokens.tolist().index(stop)
    (result,) = wait(engine.sample(sample_request(temperature=0.0, max_tokens=20, stop_tokens=(511, stop)))).sequences
    assert result.tokens.tolist() == greedy.tokens[: first + 1].tolist()
    assert result.stop_reason == "stop"
    assert len(result.logprobs) == len(result.tokens)


def test_stop_on_the_last_token_has_reason_stop(engine: Any, wait: Any):
    (greedy,) = wait(engine.sample(sample_request(temperature=0.0, max_tokens=1))).sequences
    stop = int(greedy.tokens[0])
    (result,) = wait(engine.sample(sample_request(temperature=0.0, max_tokens=1, stop_tokens=(stop,)))).sequences
    assert (result.tokens.tolist(), result.stop_reason) == ([stop], "stop")


def test_stop_string_ends_at_the_completing_token(engine: Any, tiny_llama: Path, wait: Any):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    free = wait(engine.sample(sample_request(num_samples=200, max_tokens=9)))
    cut = 0
    for index, sequence in enumerate(free.sequences):
        parts = [tokenizer.decode(sequence.tokens[: end + 1]) for end in range(len(sequence.tokens))]
        if "\ufffd" in parts[6] or cut == 4:
            continue  # part of a character decodes differently from the whole
        cut += 1
        stop = parts[6][len(parts[4]) - 1 : len(parts[4]) + 1]  # spans two tokens
        first = next(end for end, part in enumerate(parts) if stop in part)
        result = wait(engine.sample(sample_request(num_samples=200, max_tokens=9, stop_strings=("never said", stop))))
        sampled = result.sequences[index]
        assert sampled.tokens.tolist() == sequence.tokens[: first + 1].tolist()
        assert sampled.stop_reason == "stop"
    assert cut > 0, texts(tiny_llama, free)


def test_sequences_are_never_empty(engine: Any, wait: Any):
    every = tuple(range(512))
    for sequence in wait(engine.sample(sample_request(num_samples=5, stop_tokens=every))).sequences:
        assert (len(sequence.tokens), sequence.stop_reason) == (1, "stop")
    full = [int(token) for token in np.random.default_rng(0).integers(3, 500, CONTEXT)]
    (result,) = wait(engine.sample(sample_request(full, max_tokens=1))).sequences
    assert (len(result.tokens), result.stop_reason) == (1, "length")


def test_context_length_limits_without_max_tokens(engine: Any, wait: Any, tiny_llama: Path):
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 500, CONTEXT - 6)]
    (result,) = wait(engine.sample(sample_request(prompt, max_tokens=None, temperature=0.0))).sequences
    assert result.stop_reason == "length"
    assert len(result.tokens) in (6, 7)  # the last token need not be fed back
    assert result.tokens.tolist() == generate(plain_model(tiny_llama, torch.float32), prompt, 7)[: len(result.tokens)]


def test_sampler_and_reference_use_the_same_adapter(version: Any, wait: Any, tiny_llama: Path):
    engine, _, name, oracle = version()
    assert isinstance(oracle, Reference)
    logits = torch.from_numpy(oracle.logits(PROMPT)[-1])
    expected = logits.log_softmax(-1).numpy()
    for sequence in wait(engine.sample(sample_request(version=name, num_samples=16, max_tokens=1))).sequences:
        assert sequence.logprobs[0] == pytest.approx(expected[sequence.tokens[0]], abs=1e-5)
    base, adapted = (
        wait(engine.sample(sample_request(version=version_name, num_samples=4))) for version_name in (None, name)
    )
    with pytest.raises(AssertionError):
        assert_same_samples(base, adapted)
