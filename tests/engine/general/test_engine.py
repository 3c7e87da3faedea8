"""The engine on the general path: training against PEFT, sampling against `generate`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.architectures import save_tiny
from tests.engine.data import pass_for
from tests.engine.inspection import gradients_of, weights_of
from tests.engine.reference import Reference, assert_same, plain_model, write_adapter
from tinsmith.engine.base import AdamParams, LoraSpec, ModelCard, SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.general import choice, recompute
from tinsmith.engine.general.model import GeneralModel
from tinsmith.engine.model import loading
from tinsmith.engine.model.self_check import NotComputable
from tinsmith.errors import Unsupported

ATTENTION = LoraSpec(rank=4, seed=1, train_mlp=False, train_unembed=False)
MLP = LoraSpec(rank=4, seed=1, train_attn=False, train_unembed=False)
KINDS = [
    "llama",
    "gpt_oss",
    "qwen3_5_text",
    pytest.param("qwen3_moe", marks=pytest.mark.slow),
    pytest.param("gemma3_text", marks=pytest.mark.slow),
    pytest.param("qwen3_next", marks=pytest.mark.slow),
    pytest.param("glm4_moe", marks=pytest.mark.slow),
    pytest.param("jamba", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            layers = {"num_hidden_layers": 2} if kind == "llama" else {}
            made[kind] = save_tiny(kind, tmp_path_factory.mktemp(kind), **layers)
        return made[kind]

    return folder


@pytest.fixture(scope="module")
def served(folder_of: Callable[[str], Path], wait: Any) -> Any:
    """An engine on the general path by its type."""
    from tinsmith.engine.build import build

    made: dict[str, Any] = {}

    def engine_of(kind: str) -> Any:
        if kind not in made:
            config = EngineConfig(source=str(folder_of(kind)), dtype="float32", device="cpu", threads=1, path="general")
            made[kind] = build(config)
        return made[kind]

    yield engine_of
    for engine in made.values():
        wait(engine.close())


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("llama", ATTENTION),
        ("gpt_oss", ATTENTION),
        ("qwen3_5_text", MLP),
        pytest.param("qwen3_moe", ATTENTION, marks=pytest.mark.slow),
        pytest.param("gemma3_text", ATTENTION, marks=pytest.mark.slow),
        pytest.param("glm4_moe", ATTENTION, marks=pytest.mark.slow),
    ],
)
def test_gradients_and_step_match_peft(
    kind: str, spec: LoraSpec, served: Any, folder_of: Any, tmp_path: Path, wait: Any
) -> None:
    engine = served(kind)
    folder = write_adapter(folder_of(kind), tmp_path / "adapter", spec)
    wait(engine.load("m", folder, optimizer=False))
    oracle = Reference(folder_of(kind), folder, torch.float32)  # transformers' experts take no float64 on a CPU
    request = pass_for("importance_sampling", "m", lengths=(9, 1, 23, 14, 14))
    [result] = wait(engine.run([request]))
    loss, logprobs = oracle.loss(request)
    loss.backward()
    for actual, wanted in zip(result.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(actual, wanted.detach().numpy(), atol=1e-4)
    assert_same(gradients_of(engine, "m"), oracle.gradients(), 1e-3)
    adam = AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-3)
    wait(engine.step("m", adam))
    oracle.step(adam)
    assert_same(weights_of(engine, "m", wait, tmp_path / "after"), oracle.weights(), 1e-3)
    wait(engine.drop("m"))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_samples_of_a_running_batch_equal_generate(kind: str, served: Any, folder_of: Any, wait: Any) -> None:
    engine, model = served(kind), plain_model(folder_of(kind), torch.float32)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 512, length, dtype=np.int32) for length in (5, 17, 1)]
    lengths = (12, 5, 9)

    async def sample() -> list[Any]:
        requests = [
            SampleRequest(
                request_id=str(number),
                prompt=prompt,
                num_samples=2,
                max_tokens=length,
                temperature=0.0,
                stop_tokens=(),
            )
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        return list(await asyncio.gather(*(engine.sample(request) for request in requests)))

    for prompt, length, result in zip(prompts, lengths, wait(sample()), strict=True):
        ids = torch.as_tensor(prompt).long()[None]
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, min_new_tokens=length, do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :]  # fmt: skip
        for sequence in result.sequences:
            assert sequence.tokens.tolist() == expected.tolist()
            whole = torch.cat([ids[0], expected])[None]
            scores = model(whole, position_ids=torch.arange(whole.shape[1])[None]).logits[0].log_softmax(-1)
            picked = scores[len(prompt) - 1 : -1].gather(1, expected[:, None])[:, 0]
            assert np.allclose(sequence.logprobs, picked.detach().numpy(), atol=1e-3)


def test_passes_of_several_sub_passes_match_one(served: Any, monkeypatch: pytest.MonkeyPatch, wait: Any) -> None:
    engine = served("llama")
    results = []
    for limit in (2048, 30):
        monkeypatch.setattr("tinsmith.engine.general.model.PADDED_TOKENS", limit)
        wait(engine.create("m", LoraSpec(rank=4, seed=1)))
        [result] = wait(engine.run([pass_for("cross_entropy", "m", lengths=(20, 9, 23, 14))]))
        results.append((result.logprobs, engine.trainer.gradients("m")))
        wait(engine.drop("m"))
    (whole, gradients), (pieces, recomputed) = results
    assert all(np.allclose(left, right, atol=1e-5) for left, right in zip(whole, pieces, strict=True))
    for name in gradients:
        assert np.allclose(gradients[name][1], recomputed[name][1], atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        "gpt_oss",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_5_text", "nemotron_h", "gemma4_text", "zaya")),
    ],
)
def test_recomputed_layers_give_the_same_gradients(kind: str, folder_of: Any, served: Any, wait: Any) -> None:
    """Each layer runs twice with `recompute: always`, and once without; two tenants share the pass."""
    from tinsmith.engine.build import build

    path = str(folder_of(kind))
    config = EngineConfig(source=path, dtype="float32", device="cpu", threads=1, path="general", recompute="always")
    results = []
    engines: list[tuple[Any, int]] = [(served(kind), 1), (build(config), 2)]
    for engine, runs in engines:
        layer, calls = next(iter(recompute._stacks(engine.trainer._base.body, 4)))[1], []
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        inner: Any = layer.input_layernorm if hasattr(layer, "input_layernorm") else next(layer.children())
        inner.register_forward_pre_hook(lambda *_, calls=calls: calls.append("inner"))
        for seed, model_id in enumerate(("a", "b")):
            wait(engine.create(model_id, LoraSpec(rank=4, seed=seed)))
        passes = [pass_for("cross_entropy", model_id, lengths=(20, 9)) for model_id in ("a", "b")]
        result = wait(engine.run(passes))
        assert calls.count("inner") == runs * calls.count(None)
        results.append((result, [gradients_of(engine, model_id) for model_id in ("a", "b")]))
        for model_id in ("a", "b"):
            wait(engine.drop(model_id))
    (plain, expected), (recomputed, gradients) = results
    for left, right in zip(plain, recomputed, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(left.logprobs, right.logprobs, strict=True))
    for left, right in zip(expected, gradients, strict=True):
        assert_same(left, right, 1e-6)


def test_auto_falls_back_and_says_so_in_the_card(folder_of: Any, wait: Any) -> None:
    from tinsmith.engine.build import build

    engine = build(EngineConfig(source=str(folder_of("llama4_text")), dtype="float32", device="cpu", threads=1))
    assert engine.card.path == "general"
    with pytest.raises(Unsupported, match="train_mlp"):
        wait(engine.create("m", LoraSpec(rank=4, seed=1)))
    with pytest.raises(Unsupported):
        build(EngineConfig(source=str(folder_of("llama4_text")), dtype="float32", device="cpu", path="fast"))


class Part(torch.nn.Module):
    """Stands for a model; counts those that are alive."""


def fallback(monkeypatch: pytest.MonkeyPatch, error: type[Unsupported], message: str) -> tuple[ModelCard, list[int]]:
    """The card of a model whose fast path fails, and how many models were alive whenever files were read."""
    models, alive = weakref.WeakSet[Part](), list[int]()

    def read(_config: EngineConfig) -> loading.LoadedModel:
        alive.append(len(models))
        models.add(model := Part())
        return loading.LoadedModel(cast(Any, model), None, "source", "source")

    def prepare(*_loaded: Any) -> Any:
        try:
            raise RuntimeError("no choices")
        except RuntimeError as cause:
            raise error(message, "Report it.") from cause

    card = ModelCard(
        source="source", tokenizer="source", arch="llama", vocab_size=8, context_length=8, eos_token_ids=(2,),
        dtype="float32", device="cpu", path="general",
    )  # fmt: skip
    monkeypatch.setattr(loading, "read", read)
    monkeypatch.setattr(loading, "prepare", prepare)
    base = GeneralModel(card=card, model=cast(Any, None), body=cast(Any, None), tokenizer=None)
    monkeypatch.setattr(choice, "prepare", lambda *_: base)
    return choice.load(EngineConfig(source="source")).card, alive


def test_fallback_holds_one_model_at_a_time(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level("INFO")  # caplog keeps the record of the fallback, as other handlers may
    _, alive = fallback(monkeypatch, Unsupported, "cannot be computed here")
    assert alive == [0, 0]


def test_fault_of_supported_architecture_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level("INFO")
    card, _ = fallback(monkeypatch, NotComputable, "llama cannot be computed here: no choices.")
    assert "no choices" in card.general_path_fault
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    caplog.clear()
    card, _ = fallback(monkeypatch, Unsupported, "has layers of conv.")
    assert card.general_path_fault == ""
    assert [record.levelname for record in caplog.records] == ["INFO"]
