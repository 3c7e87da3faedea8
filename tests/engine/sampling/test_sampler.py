"""Sampling against transformers' generate, against the trainer, and against the distribution itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.reference import Reference, plain_model
from tests.engine.sampling.helpers import PROMPT, ask, assert_same_samples, texts, trained_logprobs
from tests.models import CONTEXT, KINDS
from tinsmith.engine.base import LoraSpec


@pytest.fixture
def version(pair: Any, wait: Any) -> Any:
    """Makes a version with a random adapter: the engine, the model's id, the version's, the oracle."""
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
    """float64 [V]: what may follow the prompt, by plain transformers."""
    with torch.no_grad():
        logits = plain_model(base)(input_ids=torch.tensor([list(prompt)])).logits[0, -1]
    return logits.log_softmax(-1).numpy()


def generate(model: torch.nn.Module, prompt: Any, length: int) -> list[int]:
    """transformers' greedy continuation, stopped by nothing."""
    ids = torch.tensor([list(prompt)])
    settings = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "use_cache": True}
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=511, **settings
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_transformers_generate(kind: str, version: Any, wait: Any, tiny: Any):
    engine, _, name, oracle = version(kind)
    for prompt in (PROMPT, PROMPT[:1], PROMPT * 4):
        for model, asked in ((plain_model(tiny(kind), torch.float32), None), (oracle.model, name)):
            found = wait(engine.sample(ask(prompt, version=asked, temperature=0.0, max_tokens=24)))
            assert 511 not in found.sequences[0].tokens  # what generate was forbidden
            assert found.sequences[0].tokens.tolist() == generate(model, prompt, 24)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_trainer_s(kind: str, version: Any, wait: Any):
    engine, model_id, name, _ = version(kind)
    base = f"{model_id}-base"
    wait(engine.create(base, LoraSpec(rank=1, seed=0)))
    for trained, asked in ((base, None), (model_id, name)):
        found = wait(engine.sample(ask(version=asked, num_samples=6, max_tokens=40)))
        gaps = [np.abs(s.logprobs - trained_logprobs(engine, wait, trained, PROMPT, s.tokens)) for s in found.sequences]
        assert np.concatenate(gaps).mean() < 1e-5
        assert np.concatenate(gaps).max() < 1e-4
    wait(engine.drop(base))


@pytest.mark.parametrize(
    "flags", [(True, False, False), (False, True, False), (False, False, True)], ids=["attn", "mlp", "unembed"]
)
def test_each_part_of_an_adapter_reaches_the_sampler(flags: Any, version: Any, wait: Any):
    lora = LoraSpec(rank=3, seed=1, train_attn=flags[0], train_mlp=flags[1], train_unembed=flags[2])
    engine, model_id, name, _ = version(lora=lora)
    (found,) = wait(engine.sample(ask(version=name))).sequences
    np.testing.assert_allclose(
        found.logprobs, trained_logprobs(engine, wait, model_id, PROMPT, found.tokens), atol=1e-4
    )


def test_temperature_scales_the_logprobs(engine: Any, tiny_llama: Path, wait: Any):
    raw = next_logprobs(tiny_llama)
    for temperature in (0.5, 0.7, 2.0):
        tempered = raw / temperature - np.log(np.exp(raw / temperature).sum())
        found = wait(engine.sample(ask(num_samples=32, max_tokens=1, temperature=temperature)))
        for sequence in found.sequences:
            assert sequence.logprobs[0] == pytest.approx(tempered[sequence.tokens[0]], abs=1e-5)


def test_greedy_logprobs_are_not_tempered(engine: Any, tiny_llama: Path, wait: Any):
    (found,) = wait(engine.sample(ask(temperature=0.0, max_tokens=1))).sequences
    assert found.logprobs[0] == pytest.approx(next_logprobs(tiny_llama).max(), abs=1e-5)


def draws(engine: Any, wait: Any, number: int, **settings: Any) -> np.ndarray:
    """First tokens of `number` samples, over several requests with seeds of their own."""
    found = [
        wait(engine.sample(ask(num_samples=500, max_tokens=1, seed=seed, **settings))) for seed in range(number // 500)
    ]
    return np.array([sequence.tokens[0] for one in found for sequence in one.sequences])


def assert_drawn_from(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-square over the likely tokens, the rest in one bin; fails by chance once in ten thousand."""
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    likely = expected >= 8
    bins = np.append(counts[likely], counts[~likely].sum()), np.append(expected[likely], expected[~likely].sum())
    used = bins[1] > 0
    statistic, freedom = ((bins[0] - bins[1])[used] ** 2 / bins[1][used]).sum(), used.sum() - 1
    # Wilson and Hilferty: the cube root of chi-square over its freedom is near normal.
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    assert normal < 3.7, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_samples_follow_the_distribution(temperature: float, engine: Any, tiny_llama: Path, wait: Any):
    scaled = np.exp(next_logprobs(tiny_llama) / temperature)
    assert_drawn_from(draws(engine, wait, 4000, temperature=temperature), scaled / scaled.sum())


def test_top_k_keeps_the_likeliest_and_leaves_logprobs_alone(engine: Any, tiny_llama: Path, wait: Any):
    raw = next_logprobs(tiny_llama)
    kept = np.zeros_like(raw)
    kept[np.argsort(raw)[-7:]] = np.exp(np.sort(raw)[-7:])
    assert_drawn_from(draws(engine, wait, 2000, top_k=7), kept / kept.sum())
    for sequence in wait(engine.sample(ask(num_samples=20, max_tokens=1, top_k=7))).sequences:
        assert sequence.logprobs[0] == pytest.approx(raw[sequence.tokens[0]], abs=1e-5)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, engine: Any, tiny_llama: Path, wait: Any):
    raw = next_logprobs(tiny_llama)
    order = np.argsort(raw)[::-1]
    reached = np.exp(raw[order]).cumsum()
    nucleus = order[: int(np.searchsorted(reached, top_p)) + 1]
    kept = np.zeros_like(raw)
    kept[nucleus] = np.exp(raw[nucleus])
    tokens = draws(engine, wait, 2000, top_p=top_p)
    assert set(tokens) <= set(nucleus)
    if len(nucleus) > 1:
        assert_drawn_from(tokens, kept / kept.sum())
    for sequence in wait(engine.sample(ask(num_samples=20, max_tokens=1, top_p=top_p))).sequences:
        assert sequence.logprobs[0] == pytest.approx(raw[sequence.tokens[0]], abs=1e-5)


def test_top_k_of_one_is_greedy(engine: Any, wait: Any):
    greedy = wait(engine.sample(ask(temperature=0.0)))
    narrow = wait(engine.sample(ask(top_k=1, num_samples=3)))
    for sequence in narrow.sequences:
        np.testing.assert_array_equal(sequence.tokens, greedy.sequences[0].tokens)


def test_the_end_of_sequence_stops_unless_nothing_may(engine: Any, wait: Any):
    stopped = wait(engine.sample(ask(num_samples=64, max_tokens=120, stop_tokens=None)))
    endless = wait(engine.sample(ask(num_samples=64, max_tokens=120, stop_tokens=())))
    reasons = {sequence.stop_reason for sequence in stopped.sequences}
    assert reasons == {"stop", "length"}
    for one, two in zip(stopped.sequences, endless.sequences, strict=True):
        assert two.stop_reason == "length"
        assert len(two.tokens) == 120
        end = np.flatnonzero(two.tokens == 2)
        length = end[0] + 1 if len(end) else 120
        assert one.stop_reason == ("stop" if len(end) else "length")
        np.testing.assert_array_equal(one.tokens, two.tokens[:length])


def test_a_stop_token_of_the_request_stops_and_is_included(engine: Any, wait: Any):
    (greedy,) = wait(engine.sample(ask(temperature=0.0, max_tokens=20))).sequences
    stop = int(greedy.tokens[6])
    first = greedy.tokens.tolist().index(stop)
    (found,) = wait(engine.sample(ask(temperature=0.0, max_tokens=20, stop_tokens=(511, stop)))).sequences
    assert found.tokens.tolist() == greedy.tokens[: first + 1].tolist()
    assert found.stop_reason == "stop"
    assert len(found.logprobs) == len(found.tokens)


def test_a_stop_on_the_last_allowed_token_is_a_stop(engine: Any, wait: Any):
    (greedy,) = wait(engine.sample(ask(temperature=0.0, max_tokens=1))).sequences
    stop = int(greedy.tokens[0])
    (found,) = wait(engine.sample(ask(temperature=0.0, max_tokens=1, stop_tokens=(stop,)))).sequences
    assert (found.tokens.tolist(), found.stop_reason) == ([stop], "stop")


def test_a_stop_string_stops_at_the_token_that_completes_it(engine: Any, tiny_llama: Path, wait: Any):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    free = wait(engine.sample(ask(num_samples=200, max_tokens=9)))
    cut = 0
    for index, sequence in enumerate(free.sequences):
        parts = [tokenizer.decode(sequence.tokens[: end + 1]) for end in range(len(sequence.tokens))]
        if "\ufffd" in parts[6] or cut == 4:
            continue  # half a character reads differently once the rest has come
        cut += 1
        stop = parts[6][len(parts[4]) - 1 : len(parts[4]) + 1]  # reaches over a boundary between tokens
        first = next(end for end, part in enumerate(parts) if stop in part)
        asked = wait(engine.sample(ask(num_samples=200, max_tokens=9, stop_strings=("never said", stop))))
        found = asked.sequences[index]
        assert found.tokens.tolist() == sequence.tokens[: first + 1].tolist()
        assert found.stop_reason == "stop"
    assert cut > 0, texts(tiny_llama, free)


def test_no_sequence_is_ever_empty(engine: Any, wait: Any):
    every = tuple(range(512))
    for sequence in wait(engine.sample(ask(num_samples=5, stop_tokens=every))).sequences:
        assert (len(sequence.tokens), sequence.stop_reason) == (1, "stop")
    full = [int(token) for token in np.random.default_rng(0).integers(3, 500, CONTEXT)]
    (found,) = wait(engine.sample(ask(full, max_tokens=1))).sequences
    assert (len(found.tokens), found.stop_reason) == (1, "length")


def test_without_max_tokens_the_context_is_the_limit(engine: Any, wait: Any, tiny_llama: Path):
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 500, CONTEXT - 6)]
    (found,) = wait(engine.sample(ask(prompt, max_tokens=None, temperature=0.0))).sequences
    assert found.stop_reason == "length"
    assert len(found.tokens) in (6, 7)  # the last token need not be read again
    assert found.tokens.tolist() == generate(plain_model(tiny_llama, torch.float32), prompt, 7)[: len(found.tokens)]


def test_the_oracle_and_the_sampler_mean_the_same_adapter(version: Any, wait: Any, tiny_llama: Path):
    engine, _, name, oracle = version()
    assert isinstance(oracle, Reference)
    logits = torch.from_numpy(oracle.logits(PROMPT)[-1])
    wanted = logits.log_softmax(-1).numpy()
    for sequence in wait(engine.sample(ask(version=name, num_samples=16, max_tokens=1))).sequences:
        assert sequence.logprobs[0] == pytest.approx(wanted[sequence.tokens[0]], abs=1e-5)
    base, adapted = (wait(engine.sample(ask(version=one, num_samples=4))) for one in (None, name))
    with pytest.raises(AssertionError):
        assert_same_samples(base, adapted)
