"""Models with Gated DeltaNet layers: training and sampling against transformers with merged adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.architectures import save_tiny
from tests.engine.model.test_precision import NoFloatCumsum
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, SampleRequest, SampleResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model.hybrid import gated_delta_net, states

KINDS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {"num_hidden_layers": 2},
    "qwen3_next": {"num_hidden_layers": 2},
}
KEY_HEADS = 2
VOCABULARY = 96
Wait = Callable[..., Any]
Pairs = Mapping[str, tuple[Tensor, Tensor]]
ADAM = AdamParams(learning_rate=0.02, eps=1e-8)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model by its kind."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_tiny(kind, tmp_path_factory.mktemp(kind), **KINDS[kind])
        return made[kind]

    return folder


@pytest.fixture(scope="module")
def hybrid(folder_of: Callable[[str], Path], wait: Wait) -> Iterator[Callable[..., Any]]:
    """An engine on a tiny model, by its kind."""
    from tinsmith.engine.build import build

    made: dict[Any, Any] = {}

    def engine(kind: str = "qwen3_5_text", **settings: Any) -> Any:
        key = (kind, *settings.items())
        if key not in made:
            options = {"dtype": "float32", "device": "cpu", "threads": 1, **settings}
            made[key] = build(EngineConfig(source=str(folder_of(kind)), **options))
        return made[key]

    yield engine
    for engine_made in made.values():
        wait(engine_made.close())


def tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length, dtype=np.int32)


def data(seed: int) -> list[Datum]:
    """Rows that share a prompt of 30 tokens and fork again later, and rows of 1 and 70 tokens."""
    prompt, first = tokens(seed, 30), tokens(seed + 1, 10)
    rows = [
        np.concatenate([prompt, first, tokens(seed + 2, 20)]),
        np.concatenate([prompt, first, tokens(seed + 3, 3)]),
        np.concatenate([prompt, tokens(seed + 4, 1)]),
        tokens(seed + 5, 1),
        tokens(seed + 6, 70),
    ]
    draw = np.random.default_rng(seed)
    return [
        Datum(tokens=row, targets=np.append(row[1:], 5).astype(np.int64),
              inputs={"weights": draw.normal(size=len(row)).astype(np.float32)})
        for row in rows
    ]  # fmt: skip


def request(model_id: str, seed: int) -> Pass:
    return Pass(model_id=model_id, data=tuple(data(seed)), loss_fn="cross_entropy", loss_config={}, forward_only=False)


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_hybrid_calls_no_float_cumsum(hybrid: Callable[..., Any], wait: Wait, kind: str, model_id: str):
    """GPUs have no deterministic kernel for it. To break it: `Tensor.cumsum` in place of `cumulative_sum` in
    `chunk_rule`."""
    engine = hybrid(kind, deterministic=True)
    with NoFloatCumsum():
        wait(engine.create(model_id, LoraSpec(rank=4, seed=0)))
        (result,) = wait(engine.run([request(model_id, 0)]))
        assert not isinstance(result, Exception)
        wait(engine.step(model_id, ADAM))
        wait(engine.capture(model_id, model_id))
        drawn = SampleRequest(
            request_id="r", version=model_id, prompt=tokens(1, 70), num_samples=2, max_tokens=3, seed=1, top_p=0.9
        )
        assert all(each.tokens.size for each in wait(engine.sample(drawn)).sequences)
    wait(engine.drop(model_id))


def trained(engine: Any, wait: Wait, model_id: str, seed: int, rank: int = 4) -> str:
    """Create a model and train it for a few steps, so that no adapter matrix is zero."""
    wait(engine.create(model_id, LoraSpec(rank=rank, seed=seed)))
    for step in range(2):
        wait(engine.run([request(model_id, 100 * seed + step)]))
        wait(engine.step(model_id, ADAM))
    return model_id


def pairs_of(engine: Any, model_id: str) -> tuple[Pairs, float]:
    """Copies of the model's A and B by site, as leaves, and their scale."""
    snapshot = engine.trainer.capture(model_id)
    pairs = snapshot.layout.pairs(snapshot.master.clone())
    return {n: (p.a.clone().requires_grad_(), p.b.clone().requires_grad_()) for n, p in pairs.items()}, (
        snapshot.layout.scale
    )


def logits(model: torch.nn.Module, pairs: Pairs, scale: float, row: np.ndarray) -> Tensor:
    """[N, V] of transformers' model with merged adapters."""
    deltas = {name: scale * b @ a for name, (a, b) in pairs.items()}
    weights = dict(model.named_parameters())
    merged = {f"{name}.weight": delta for name, delta in deltas.items()}
    for name in [name for name in deltas if name.rpartition(".")[2] == "in_proj_q"]:
        layer = name.removesuffix("in_proj_q")
        parts = [merged.pop(f"{layer}in_proj_{part}.weight") for part in "qkv"]
        merged[f"{layer}in_proj_qkv.weight"] = torch.cat(parts)
    for name in [name for name in merged if name.endswith("in_proj_qkv.weight") and name not in weights]:
        whole = f"{name.removesuffix('in_proj_qkv.weight')}in_proj_qkvz.weight"  # Qwen3-Next: by key head
        z = merged.pop(name.replace("qkv", "z"))
        query, key, value = (part for part in merged.pop(name).split([32, 32, 64]))
        by_head = [part.view(KEY_HEADS, -1, part.shape[1]) for part in (query, key, value, z)]
        merged[whole] = torch.cat(by_head, 1).flatten(0, 1)
    for name in [name for name in merged if name.endswith("experts.w1.weight")]:
        stack = name.removesuffix("w1.weight")
        merged[f"{stack}gate_up_proj"] = torch.cat([merged.pop(f"{stack}{part}.weight") for part in ("w1", "w3")], 1)
        merged[f"{stack}down_proj"] = merged.pop(f"{stack}w2.weight")
    changed = {name: weights[name] + delta for name, delta in merged.items()}
    ids = torch.as_tensor(row.astype(np.int64))[None]
    return torch.func.functional_call(model, changed, kwargs={"input_ids": ids}).logits[0]


def plain(folder: Path) -> torch.nn.Module:
    return (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        .eval()
        .requires_grad_(False)
    )


def close(actual: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Within `tolerance` of the norm, at least of 1."""
    actual, expected = (torch.as_tensor(value).detach().float() for value in (actual, expected))
    assert float((actual - expected).norm()) <= tolerance * max(float(expected.norm()), 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_gradients_and_a_step_equal_transformers(
    kind: str, hybrid: Callable[..., Any], folder_of: Callable[[str], Path], wait: Wait, model_id: str
) -> None:
    engine, base = hybrid(kind), plain(folder_of(kind))
    wait(engine.fork(model_id, trained(engine, wait, f"{model_id}-source", 1), optimizer=False))
    pairs, scale = pairs_of(engine, model_id)
    (result,) = wait(engine.run([request(model_id, 7)]))
    loss: Any = 0
    for datum, actual in zip(data(7), result.logprobs, strict=True):
        expected = logits(base, pairs, scale, datum.tokens).log_softmax(-1)
        expected = expected.gather(1, torch.as_tensor(datum.targets)[:, None])[:, 0]
        close(actual, expected)
        loss = loss - (expected * torch.as_tensor(datum.inputs["weights"])).sum()
    loss.backward()
    for name, (a_grad, b_grad) in engine.trainer.gradients(model_id).items():
        close(a_grad, pairs[name][0].grad, 2e-4)
        close(b_grad, pairs[name][1].grad, 2e-4)
    # With a smaller eps, Adam's first step is the sign of a gradient, whatever rounding left of it.
    adam = AdamParams(learning_rate=0.02, eps=1.0)
    leaves = [leaf for pair in pairs.values() for leaf in pair]
    torch.optim.AdamW(leaves, lr=0.02, betas=(adam.beta1, adam.beta2), eps=1.0, weight_decay=adam.weight_decay).step()
    wait(engine.step(model_id, adam))
    for name, (a, b) in pairs_of(engine, model_id)[0].items():
        close(a, pairs[name][0])
        close(b, pairs[name][1])


def test_recomputed_recurrence_gives_the_gradients_of_a_kept_one(
    hybrid: Callable[..., Any], wait: Wait, model_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = hybrid()
    trained(engine, wait, model_id, 5)
    wait(engine.run([request(model_id, 11)]))
    expected_grads = engine.trainer.gradients(model_id)
    wait(engine.step(model_id, AdamParams(learning_rate=0.0)))
    calls = list[Any]()
    recompute = gated_delta_net.recomputed
    monkeypatch.setattr(gated_delta_net, "recomputed", lambda *inputs: calls.append(1) or recompute(*inputs))
    monkeypatch.setattr(states, "MAX_KEPT_BYTES", 0)
    wait(engine.run([request(model_id, 11)]))
    assert calls
    for name, grads in engine.trainer.gradients(model_id).items():
        for actual, expected in zip(grads, expected_grads[name], strict=True):
            close(actual, expected, 1e-6)


def ask(prompt: np.ndarray, **settings: Any) -> SampleRequest:
    options = {"max_tokens": 12, "temperature": 0.0, "stop_tokens": (), "seed": 1, **settings}
    return SampleRequest(request_id="r", prompt=prompt, **options)


def samples(engine: Any, wait: Wait, *requests: SampleRequest) -> list[SampleResult]:
    """The requests' results, computed side by side."""

    async def together() -> list[SampleResult]:
        return list(await asyncio.gather(*(engine.sample(request) for request in requests)))

    return wait(together())  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_samples_equal_generate(
    kind: str, hybrid: Callable[..., Any], folder_of: Callable[[str], Path], wait: Wait
) -> None:
    engine, base = hybrid(kind), plain(folder_of(kind))
    prompts = [tokens(seed, length) for seed, length in enumerate((1, 2, 3, 5, 64, 65, 100))]
    results = samples(engine, wait, *(ask(prompt) for prompt in prompts))
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.as_tensor(prompt.astype(np.int64))[None]
        expected = base.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert result.sequences[0].tokens.tolist() == expected[0, len(prompt) :].tolist()


def check_logprobs(base: torch.nn.Module, prompt: np.ndarray, result: SampleResult) -> None:
    """A result's logprobs are those of the full forward of transformers."""
    for sequence in result.sequences:
        row = np.concatenate([prompt, sequence.tokens])
        expected = logits(base, {}, 1.0, row).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = expected.gather(1, torch.as_tensor(sequence.tokens.astype(np.int64))[:, None])[:, 0]
        assert float((torch.as_tensor(sequence.logprobs) - expected).abs().max()) < 1e-4


def test_samples_of_a_shared_prompt_branch_its_state(
    hybrid: Callable[..., Any], folder_of: Callable[[str], Path], wait: Wait
) -> None:
    engine, base = hybrid(), plain(folder_of("qwen3_5_text"))
    long, short = tokens(50, 160), tokens(51, 9)  # 8 x 160 tokens: a prompt row of its own
    requests = [ask(prompt, num_samples=8, temperature=1.0) for prompt in (long, short)]
    for prompt, result in zip((long, short), samples(engine, wait, *requests), strict=True):
        assert len({sequence.tokens.tobytes() for sequence in result.sequences}) == 8
        check_logprobs(base, prompt, result)


def test_conversation_continues_from_saved_states(
    hybrid: Callable[..., Any], folder_of: Callable[[str], Path], wait: Wait
) -> None:
    engine, base = hybrid(), plain(folder_of("qwen3_5_text"))
    prompt = tokens(60, 40)
    for turn in range(3):
        (result,) = samples(engine, wait, ask(prompt, temperature=1.0, cache_scope="talk"))
        (fresh,) = samples(engine, wait, ask(prompt, temperature=1.0, cache_scope=f"fresh-{turn}"))
        assert result.prompt_cache_hit_tokens == (0 if turn == 0 else len(prompt) - 6)
        assert fresh.prompt_cache_hit_tokens == 0
        assert result.sequences[0].tokens.tolist() == fresh.sequences[0].tokens.tolist()
        check_logprobs(base, prompt, result)
        prompt = np.concatenate([prompt, result.sequences[0].tokens, tokens(61 + turn, 5)])


def test_prompt_that_leaves_a_cached_one_in_its_middle(
    hybrid: Callable[..., Any], folder_of: Callable[[str], Path], wait: Wait
) -> None:
    engine, base = hybrid(), plain(folder_of("qwen3_5_text"))
    first = tokens(70, 50)
    samples(engine, wait, ask(first, cache_scope="middle"))
    branches = [np.concatenate([first[:cut], tokens(71 + cut, 7)]) for cut in (1, 30, 49, 50)]
    results = samples(engine, wait, *(ask(prompt, cache_scope="middle", num_samples=2) for prompt in branches))
    assert [result.prompt_cache_hit_tokens for result in results] == [0, 0, 0, 50]
    for prompt, result in zip(branches, results, strict=True):
        check_logprobs(base, prompt, result)


def test_repeated_prompt_gives_equal_numbers(hybrid: Callable[..., Any], wait: Wait) -> None:
    engine, prompt = hybrid(), tokens(80, 33)
    first, second = (samples(engine, wait, ask(prompt, cache_scope="again"))[0] for _ in range(2))
    assert second.prompt_cache_hit_tokens == len(prompt)
    assert first.sequences[0].tokens.tolist() == second.sequences[0].tokens.tolist()
    assert np.abs(first.sequences[0].logprobs - second.sequences[0].logprobs).max() < 1e-5


def test_full_cache_evicts_states_and_makes_sequences_wait(
    hybrid: Callable[..., Any], wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = hybrid(cache_tokens=3000)
    batch, taken, decode = engine.sampler.batch, list[int](), engine.sampler.batch.decode

    def recorded() -> Any:
        taken.append(batch.kv_cache.tokens)
        assert len(batch.kv_cache.states.recurrent[0]) <= 3000 // batch.state_tokens
        return decode()

    monkeypatch.setattr(batch, "decode", recorded)
    samples(engine, wait, *(ask(tokens(90 + seed, 60), num_samples=2, temperature=1.0) for seed in range(20)))
    assert engine.card.state_tokens == batch.state_tokens > 0
    assert 1500 < max(taken) <= 3000
    assert 0 < batch.prefix_cache.tokens <= 3000
    assert batch.kv_cache.tokens == 0
    assert batch.kv_cache.states.rows == []


def test_two_tenants_equal_each_alone(hybrid: Callable[..., Any], wait: Wait, model_id: str) -> None:
    engine = hybrid()
    models = [trained(engine, wait, f"{model_id}-{seed}", seed, rank) for seed, rank in ((2, 4), (3, 8))]
    alone = []
    for model in models:
        wait(engine.capture(model, model))
        (result,) = wait(engine.run([request(model, 9)]))
        (sample,) = samples(engine, wait, ask(tokens(5, 40), version=model, cache_scope="alone"))
        alone.append((result, engine.trainer.gradients(model), sample))
        wait(engine.step(model, AdamParams(learning_rate=0.0)))  # clears the gradient
    together = wait(engine.run([request(model, 9) for model in models]))
    requests = (ask(tokens(5, 40), version=model, cache_scope="both") for model in models)
    sampled = samples(engine, wait, *requests)
    for model, result, sample, (scored, gradients, sample_alone) in zip(models, together, sampled, alone, strict=True):
        for actual, expected in zip(result.logprobs, scored.logprobs, strict=True):
            close(actual, expected, 1e-5)
        for name, grads in engine.trainer.gradients(model).items():
            for actual, expected in zip(grads, gradients[name], strict=True):
                close(actual, expected)
        assert sample.sequences[0].tokens.tolist() == sample_alone.sequences[0].tokens.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampler_and_trainer_give_the_same_logprobs(
    dtype: str, hybrid: Callable[..., Any], wait: Wait, model_id: str
) -> None:
    engine = hybrid(dtype=dtype)
    trained(engine, wait, model_id, 4)
    wait(engine.capture(model_id, model_id))
    prompt = tokens(8, 60)
    sampling = ask(prompt, version=model_id, temperature=1.0, max_tokens=100, num_samples=8)
    (result,) = samples(engine, wait, sampling)
    rows = [np.concatenate([prompt, sequence.tokens]) for sequence in result.sequences]
    batch = tuple(
        Datum(tokens=row[:-1], targets=row[1:].astype(np.int64),
              inputs={"weights": np.ones(len(row) - 1, np.float32)}) for row in rows
    )  # fmt: skip
    forward = Pass(model_id=model_id, data=batch, loss_fn="cross_entropy", loss_config={}, forward_only=True)
    (scored,) = wait(engine.run([forward]))
    differences = np.concatenate([
        logprobs[len(prompt) - 1 :] - sequence.logprobs
        for logprobs, sequence in zip(scored.logprobs, result.sequences, strict=True)
    ])  # fmt: skip
    if dtype == "float32":
        assert np.quantile(np.abs(differences), 0.99) < 2e-5
        assert np.abs(differences).max() < 1e-3  # of one improbable token in 800
    else:
        assert np.mean(np.expm1(differences) - differences) < 5e-4  # KL
