"""Steps whose layers are one call have the bits of those that are computed layer by layer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.conftest import engines
from tests.engine.cpu.processor import each_dtype, needs_panels
from tests.engine.data import pass_for
from tests.engine.sampling.helpers import sample_request
from tests.models import VOCABULARY, save_tokenizer
from tinsmith.engine.base import AdamParams, LoraSpec, SampleResult
from tinsmith.engine.cpu.compiling import compile_part
from tinsmith.engine.cpu.instructions import kind_of
from tinsmith.engine.model.precision import dtype_name
from tinsmith.engine.sampling import sampler
from tinsmith.engine.sampling.banks.layers import CompiledLayers

pytestmark = needs_panels
KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Without and with a window, biases, and norms of heads."""
OTHERS = ("Qwen3Moe", "Gemma2")
SPECS = (
    LoraSpec(rank=8, seed=1),
    LoraSpec(rank=16, seed=2, train_mlp=False),
    LoraSpec(rank=8, seed=3, train_attn=False),
)


@pytest.fixture(scope="module")
def engine_with(tmp_path_factory: pytest.TempPathFactory, wait: Any) -> Iterator[Callable[..., Any]]:
    """Engines of tiny models whose widths compiled functions multiply, by the name of their class."""
    import transformers

    def folder_of(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=VOCABULARY, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, head_dim=16, initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            sliding_window=24,
        )  # fmt: skip
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
        save_tokenizer(folder)
        return folder

    with engines(folder_of, wait) as engine:

        def engine_with(kind: str, dtype: torch.dtype, threads: int = 1) -> Any:
            compile_part("layers", kind_of(dtype))
            return engine(kind, dtype=dtype_name(dtype), threads=threads)

        yield engine_with


async def samples(engine: Any, versions: list[str | None]) -> list[SampleResult]:
    """Of prompts that share a beginning, with groups that share a whole prompt, under all versions at once."""
    draw = np.random.default_rng(0)
    start = draw.integers(3, VOCABULARY, 40)
    requests = [
        sample_request(
            np.concatenate([start, draw.integers(3, VOCABULARY, 3 + 5 * number)]),
            version=version,
            num_samples=1 + 3 * number,
            max_tokens=6 + 9 * number,
            cache_scope=f"{version}",
        )
        for number, version in enumerate(versions)
    ]
    return list(await asyncio.gather(*map(engine.sample, requests)))


@each_dtype
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_single_layers(
    kind: str, threads: int, dtype: torch.dtype, engine_with: Callable[..., Any], wait: Any, monkeypatch: Any
) -> None:
    engine, steps = engine_with(kind, dtype, threads), list[int]()
    batch = engine.sampler.batch
    assert batch.layers is not None
    whole = batch.layers.hidden

    def counted(tokens: torch.Tensor, *arguments: Any) -> torch.Tensor:
        steps.append(len(tokens))
        return whole(tokens, *arguments)

    async def main() -> None:
        names = [f"{kind}{threads}{number}" for number in range(len(SPECS))]
        for name, spec in zip(names, SPECS, strict=True):
            await engine.create(name, spec)
            await engine.run([pass_for("cross_entropy", name, seed=spec.seed)])
            await engine.step(name, AdamParams(learning_rate=0.05))
            await engine.capture(name, name)
        for versions in ([None, None], [names[0], names[0]], [names[1]], [names[2]], [None, names[0]], names):
            monkeypatch.setattr(batch.layers, "hidden", counted)
            actual = await samples(engine, versions)
            assert steps or len(versions) == len(names)  # adapters of several modules are computed layer by layer
            steps.clear()
            with monkeypatch.context() as patch:
                patch.setattr(batch, "layers", None)
                expected = await samples(engine, versions)
            for left, right in zip(actual, expected, strict=True):
                for sampled, single in zip(left.sequences, right.sequences, strict=True):
                    assert np.array_equal(sampled.tokens, single.tokens)
                    assert np.array_equal(sampled.logprobs, single.logprobs)
        for name in names:
            await engine.detach(name)
            await engine.drop(name)

    wait(main())


@each_dtype
@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_are_computed_layer_by_layer(
    kind: str, dtype: torch.dtype, engine_with: Callable[..., Any]
) -> None:
    assert engine_with(kind, dtype).sampler.batch.layers is None


@each_dtype
def test_layers_are_used_once_they_are_compiled(
    dtype: torch.dtype, engine_with: Callable[..., Any], wait: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests before that do not wait, and another process compiles."""
    compiled, compiling = set[str](), list[str]()
    monkeypatch.setattr(sampler, "is_compiled", lambda part, _: part in compiled)
    processes = SimpleNamespace(start=lambda _, *parts: compiling.extend(parts))
    monkeypatch.setattr(sampler, "Compilation", lambda: processes)
    engine = engine_with("Llama", dtype, 5)
    expected = wait(samples(engine, [None]))
    assert engine.sampler.batch.layers is None
    assert compiling == ["layers"]
    compiled.add("layers")
    actual = wait(samples(engine, [None]))
    assert engine.sampler.batch.layers is not None
    assert np.array_equal(actual[0].sequences[0].logprobs, expected[0].sequences[0].logprobs)


@each_dtype
@pytest.mark.parametrize("fails", [True, False])
def test_other_bits_are_not_used(
    dtype: torch.dtype, fails: bool, engine_with: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = CompiledLayers.hidden

    def wrong(*arguments: Any) -> torch.Tensor:
        if fails:
            raise RuntimeError("nothing runs here")
        return whole(*arguments) * (1 + torch.finfo(dtype).eps)

    monkeypatch.setattr(CompiledLayers, "hidden", wrong)
    assert engine_with("Llama", dtype, 3 + fails).sampler.batch.layers is None  # an engine of its own
    monkeypatch.undo()
    assert engine_with("Llama", dtype, 6).sampler.batch.layers is not None
