"""Rope type longrope below, at and beyond the original context, against transformers with one row at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.architectures import save_tiny, tiny_config, tiny_model
from tests.engine.conftest import engines
from tests.engine.inspection import gradients_of
from tests.engine.reference import Reference, assert_same, plain_model, write_adapter
from tests.engine.sampling.helpers import sample_request, trained_logprobs
from tinsmith.engine.base import Datum, LoraSpec, ModelCard, Pass, SampleResult
from tinsmith.engine.model import packing, support
from tinsmith.engine.model.architectures import longrope
from tinsmith.engine.sample_validation import check_sample
from tinsmith.engine.sampling import row_renewal
from tinsmith.engine.sampling.prefill import prefill_pass
from tinsmith.errors import BadRequest, EngineError, Unsupported

SHORT, LONGEST = 64, 256
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": SHORT,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
    "factor": 4.0,
}
KINDS = {"phi3": {"original_max_position_embeddings": SHORT}, "llama": {}, "qwen3_moe": {}}
TOKENS = np.random.default_rng(5).integers(3, 500, LONGEST)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in folders:
            settings = {"num_hidden_layers": 2, "sliding_window": None, "rope_parameters": dict(ROPE), **KINDS[kind]}
            folders[kind] = save_tiny(kind, tmp_path_factory.mktemp(kind), **settings)
        return folders[kind]

    return folder


@pytest.fixture(scope="module")
def engine_for(saved: Callable[[str], Path], wait: Any) -> Iterator[Callable[..., Any]]:
    with engines(saved, wait) as engine:
        yield engine


def datum(row: np.ndarray) -> Datum:
    return Datum(tokens=row[:-1].astype(np.int32), targets=row[1:].astype(np.int64))


def stepwise_logprobs(folder: Path, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """float32 [len(tokens), V]: by a forward of transformers over all tokens before each of `tokens`."""
    model = plain_model(folder, torch.float32)
    row = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
    with torch.no_grad():
        last = [model(input_ids=row[None, : len(prompt) + step]).logits[0, -1] for step in range(len(tokens))]
    return torch.stack(last).log_softmax(-1).numpy()


def assert_steps(folder: Path, prompt: np.ndarray, result: SampleResult) -> None:
    """Every logprob of the samples is transformers' after the tokens before it."""
    for sequence in result.sequences:
        wanted = stepwise_logprobs(folder, prompt, sequence.tokens)
        picked = wanted[np.arange(len(sequence.tokens)), sequence.tokens]
        np.testing.assert_allclose(sequence.logprobs, picked, atol=1e-4)


def test_packed_rows_of_all_lengths_match_peft(
    saved: Any, engine_for: Any, wait: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if rows of different factors share a prefix (`packing._common_prefix`) or take those of the longest row."""
    monkeypatch.setattr(
        "tests.engine.reference.target_modules",
        lambda _: ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"],
    )
    folder, engine = saved("phi3"), engine_for("phi3")
    adapter = write_adapter(folder, tmp_path / "adapter", LoraSpec(rank=4, seed=1))
    wait(engine.load("m", adapter, optimizer=False))
    # One prefix below, at and beyond the boundary, and branches of the long ones.
    rows = [TOKENS[: length + 1] for length in (40, SHORT, SHORT + 1, 130)]
    rows += [np.concatenate([TOKENS[:90], TOKENS[200:230]]), np.concatenate([TOKENS[:50], TOKENS[200:205]])]
    data = tuple(datum(row) for row in rows)
    (result,) = wait(engine.run([Pass(model_id="m", data=data, loss_fn="cross_entropy")]))
    reference = Reference(folder, adapter)
    for actual, row in zip(result.logprobs, data, strict=True):
        loss, wanted = reference.loss(Pass(model_id="m", data=(row,), loss_fn="cross_entropy"))
        loss.backward()
        np.testing.assert_allclose(actual, wanted[0].detach().numpy(), atol=1e-4)
    assert_same(gradients_of(engine, "m"), reference.gradients(), 1e-3)


def test_rows_share_prefixes_among_equal_factors() -> None:
    """Fails without `long_factors` in the order of rows or in `_common_prefix`."""
    # By tokens alone, a long row would come between the last row and the short one that it shares 50 tokens with.
    tokens = [*(TOKENS[:length] for length in (90, 20, 70, 60)), np.append(TOKENS[:50], 511)]
    rows = [
        packing.PackedRow(key=key, adapter=0, tokens=row.astype(np.int32), long_factors=len(row) > SHORT)
        for key, row in enumerate(tokens)
    ]
    tree = packing.pack(rows)
    assert len(tree.tokens) == 60 + 90 + 1
    assert tree.rotary is not None
    for row in rows:
        positions = tree.rotary[tree.index[row.key]]
        expected = np.arange(len(row.tokens))
        np.testing.assert_array_equal(positions, ~expected if row.long_factors else expected)


@pytest.mark.parametrize("length", [20, SHORT, SHORT + 1, 200])
def test_prompt_logprobs_match_transformers(length: int, saved: Any, engine_for: Any, wait: Any) -> None:
    engine, prompt = engine_for("phi3"), TOKENS[:length]
    result = wait(engine.sample(sample_request(prompt, max_tokens=1, prompt_logprobs=True)))
    with torch.no_grad():
        logits = plain_model(saved("phi3"), torch.float32)(input_ids=torch.from_numpy(prompt)[None]).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(1, torch.from_numpy(prompt[1:, None]))[:, 0].numpy()
    np.testing.assert_allclose(result.prompt_logprobs[1:], wanted, atol=1e-4)


def test_greedy_decoding_over_the_boundary_equals_generate(saved: Any, engine_for: Any, wait: Any) -> None:
    """transformers drops its cache there. Fails without `RowRenewal` or with keys of short factors."""
    engine, model = engine_for("phi3"), plain_model(saved("phi3"), torch.float32)
    for length in (SHORT - 20, SHORT - 1, SHORT, SHORT + 1, 100):
        prompt = TOKENS[:length]
        (sequence,) = wait(engine.sample(sample_request(prompt, temperature=0.0, max_tokens=40))).sequences
        ids = torch.from_numpy(prompt)[None]
        settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)  # type: ignore[operator]
        assert sequence.tokens.tolist() == generated[0, length:].tolist(), length


@pytest.mark.parametrize("settings", [{}, {"pass_tokens": 32}, {"deterministic": True}])
def test_groups_over_the_boundary_match_transformers(
    settings: dict[str, Any], saved: Any, engine_for: Any, wait: Any, cache_scope: str
) -> None:
    """Samples of one prompt, renewed in one pass or in several."""
    engine, folder = engine_for("llama", **settings), saved("llama")
    prompt = TOKENS[: SHORT - 6]
    result = wait(engine.sample(sample_request(prompt, num_samples=4, max_tokens=20, cache_scope=cache_scope)))
    assert len({tuple(sequence.tokens.tolist()) for sequence in result.sequences}) > 1
    assert_steps(folder, prompt, result)
    assert engine.sampler.batch.kv_cache.tokens == 0


def test_prompt_is_renewed_in_the_first_of_several_passes(
    engine_for: Any, wait: Any, monkeypatch: pytest.MonkeyPatch, cache_scope: str
) -> None:
    """Fails if `RowRenewal` does not cache the prompt for its next passes."""
    engine, sizes, length = engine_for("llama", pass_tokens=32), list[int](), SHORT - 9

    def observed(*inputs: Any) -> Any:
        prefill = prefill_pass(*inputs)
        sizes.append(len(prefill.tokens))
        return prefill

    monkeypatch.setattr(row_renewal, "prefill_pass", observed)
    request = sample_request(TOKENS[20 : 20 + length], num_samples=4, max_tokens=20, cache_scope=cache_scope)
    wait(engine.sample(request))
    assert (len(sizes), sizes[0]) == (4, SHORT)
    assert max(sizes[1:]) < 10


def test_shared_prompt_row_is_renewed_once(
    saved: Any, engine_for: Any, wait: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if `RowRenewal` copies the prompt to the row of each sequence."""
    monkeypatch.setattr("tinsmith.engine.sampling.capacity.MIN_SHARED_TOKENS", 64)
    engine, observed = engine_for("llama"), list[int]()
    prompt, cache = TOKENS[10 : 10 + SHORT - 6], engine.sampler.batch.kv_cache
    request = sample_request(prompt, num_samples=4, max_tokens=20)
    result = wait(engine.sample(request, lambda _: observed.append(cache.tokens)))
    assert_steps(saved("llama"), prompt, result)
    assert set(observed[4:-4]) == {64 + 4 * 64}  # the prompt's row, and one for each sequence
    assert cache.tokens == 0


def test_failure_while_renewing_frees_all_rows(engine_for: Any, wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.engine.sampling.capacity.MIN_SHARED_TOKENS", 64)
    engine, cache = engine_for("llama"), engine_for("llama").sampler.batch.kv_cache
    insert_after, request = cache.insert_after, sample_request(TOKENS[:60], num_samples=4, max_tokens=20)

    def failing(shared_prefix: Any, min_capacity: int, prompt: Any = None) -> Any:
        return insert_after(shared_prefix, min_capacity) if prompt is None else 1 / 0

    with monkeypatch.context() as broken:
        broken.setattr(cache, "insert_after", failing)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            wait(engine.sample(request))
    assert cache.tokens == 0
    assert len(wait(engine.sample(request)).sequences) == 4


def test_jobs_cross_the_boundary_beside_each_other(saved: Any, engine_for: Any, wait: Any, cache_scope: str) -> None:
    """Short, crossing and long rows in the same decoding steps."""
    engine, prompts = engine_for("llama"), [TOKENS[:length] for length in (10, 50, 60, 64, 65, 120)]

    async def together() -> list[SampleResult]:
        requests = [sample_request(prompt, max_tokens=24, cache_scope=cache_scope) for prompt in prompts]
        return await asyncio.gather(*(engine.sample(request) for request in requests))

    for prompt, result in zip(prompts, wait(together()), strict=True):
        assert_steps(saved("llama"), prompt, result)


def test_prefix_cache_holds_factors_apart(saved: Any, engine_for: Any, wait: Any, cache_scope: str) -> None:
    """A turn beyond the boundary finds nothing of the shorter turns; the next one finds it. Fails without the factors
    in `SampleJob.scope_of`."""
    engine = engine_for("llama")
    hits = []
    for length in (40, 60, 80, 100, 50):
        request = sample_request(TOKENS[:length], max_tokens=3, cache_scope=cache_scope)
        result = wait(engine.sample(request))
        hits.append(result.prompt_cache_hit_tokens)
        assert_steps(saved("llama"), TOKENS[:length], result)
    assert hits == [0, 40, 0, 80, 49]
    # A row that crosses the boundary is found as a long one.
    first = wait(engine.sample(sample_request(TOKENS[100:160], max_tokens=10, cache_scope=cache_scope)))
    row = np.concatenate([TOKENS[100:160], first.sequences[0].tokens, [7]])
    result = wait(engine.sample(sample_request(row, max_tokens=3, cache_scope=cache_scope)))
    assert result.prompt_cache_hit_tokens == 69
    assert_steps(saved("llama"), row, result)


def test_sampler_and_trainer_agree_beyond_the_boundary(engine_for: Any, wait: Any, model_id: str) -> None:
    engine, prompt = engine_for("phi3"), TOKENS[:100]
    wait(engine.create(model_id, LoraSpec(rank=2, seed=0)))
    (sequence,) = wait(engine.sample(sample_request(prompt, max_tokens=30))).sequences
    trained = trained_logprobs(engine, wait, model_id, prompt, sequence.tokens)
    np.testing.assert_allclose(sequence.logprobs, trained, atol=1e-5)


def test_general_path_serves_the_original_context(saved: Any, engine_for: Any, wait: Any) -> None:
    card = engine_for("llama", path="general").card
    assert (card.context_length, card.original_context) == (SHORT, 0)
    with pytest.raises(BadRequest, match=r"is 64 \(its maximum is 256, but longrope changes all rotations"):
        check_sample(sample_request(range(65), num_samples=1, max_tokens=1), card)


def test_context_of_other_rope_types(saved: Any) -> None:
    """`dynamic` changes nothing up to `max_position_embeddings`; tables of two lengths limit the context."""

    def config(**rope: Any) -> Any:
        return tiny_config("llama", rope_parameters={"rope_theta": 1e4, **rope})

    dynamic = config(rope_type="dynamic", factor=2.0, original_max_position_embeddings=SHORT)
    assert (support.context_length(dynamic), support.original_context(dynamic)) == ((LONGEST, ""), 0)
    several = config(**ROPE)
    assert (support.context_length(several), support.original_context(several)) == ((LONGEST, ""), SHORT)
    several.rope_parameters = {"full": ROPE, "local": {**ROPE, "original_max_position_embeddings": 32}}
    assert support.context_length(several)[0] == 32
    assert support.original_context(several) == 0


def test_model_without_longrope_module_is_refused() -> None:
    with pytest.raises(Unsupported, match="no module that computes it"):
        longrope.install("m", tiny_model("llama"), SHORT)


def test_records_of_experts_over_the_boundary_are_refused(engine_for: Any, wait: Any) -> None:
    engine = engine_for("qwen3_moe")
    for length, max_tokens, refused in ((60, 5, False), (60, 6, True), (60, None, True), (65, 20, False)):
        call = engine.sample(sample_request(TOKENS[:length], max_tokens=max_tokens, routed_experts=True))
        if refused:
            with pytest.raises(Unsupported, match="choose other experts"):
                wait(call)
        else:
            (sequence,) = wait(call).sequences
            assert len(sequence.routed_experts) == len(sequence.tokens) - 1


def test_vllm_gets_requests_that_stay_below_the_boundary() -> None:
    """vLLM decides for all rows at once, by the longest that it may serve."""
    from tinsmith.engine.vllm import client

    card = ModelCard(
        source="m", tokenizer="m", arch="phi3", vocab_size=512, context_length=LONGEST, eos_token_ids=(2,),
        dtype="float32", device="cpu", original_context=SHORT,
    )  # fmt: skip
    for length, max_tokens, supported in ((40, 24, True), (40, 25, False), (40, None, False), (70, 5, False)):
        request = sample_request(range(3, length + 3), max_tokens=max_tokens)
        assert client.is_supported(request, card) == supported
