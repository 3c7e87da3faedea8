"""Decoding steps of mixtures of experts as graphs, where a layer's experts are grouped products."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.architectures import save_tiny
from tests.engine.data import pass_for
from tests.engine.device.programs import ADAM, grouped_products_on_device
from tests.engine.sampling.helpers import assert_same_samples, sample_request
from tests.engine.sampling.paged.recorded import CountingCapture, Recorder, capture
from tinsmith.engine.base import LoraSpec, SampleResult
from tinsmith.engine.lora.experts.owners import owners_of
from tinsmith.engine.sampling.paged import choice
from tinsmith.engine.sampling.paged.step import DecodeStep
from tinsmith.engine.torch_engine import TorchEngine

Build = Callable[..., TorchEngine]
VERSIONS = {None: None, "attention": False, "experts": True}
"""The base model, and adapters without and with matrices of experts."""


@pytest.fixture(autouse=True)
def grouped_products() -> Iterator[None]:
    with grouped_products_on_device():
        yield


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("mixture"), num_hidden_layers=2)


async def trained(engine: TorchEngine) -> TorchEngine:
    for version, train_mlp in VERSIONS.items():
        if version is not None:
            await engine.create(version, LoraSpec(rank=8, seed=0, train_mlp=bool(train_mlp)))
            await engine.run([pass_for("ppo", version)])
            await engine.step(version, ADAM)
            await engine.capture(version, version)
    return engine


async def samples(engine: TorchEngine) -> list[SampleResult]:
    """Samples of each version alone."""
    return [await engine.sample(sample_request(version=version, num_samples=2, max_tokens=5)) for version in VERSIONS]


@pytest.mark.usefixtures("operators_alone")
def test_recorded_steps_of_mixtures_give_the_same_tokens(
    paged: Build, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = CountingCapture()
    engine = asyncio.run(trained(paged(mixture, counted, dtype="bfloat16")))
    results = asyncio.run(samples(engine))
    assert counted.replays == 6  # of two versions; the first of four steps compiles
    monkeypatch.setattr(DecodeStep, "_replay", lambda step, shape, _: step._compute(shape))
    for actual, expected in zip(results, asyncio.run(samples(engine)), strict=True):
        assert_same_samples(actual, expected)


@pytest.mark.usefixtures("operators_alone")
def test_steps_of_mixtures_are_the_same_operators(paged: Build, mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same addresses, and none of them gives a value to the host."""
    signatures: list[list[tuple[Any, ...]]] = []
    compute = DecodeStep._compute

    def recorded(step: DecodeStep, shape: Any, *spans: Any) -> None:
        with Recorder() as recorder:
            compute(step, shape, *spans)
        signatures.append(recorder.signature())

    monkeypatch.setattr(DecodeStep, "_compute", recorded)
    asyncio.run(paged(mixture, dtype="bfloat16").sample(sample_request(num_samples=2, max_tokens=5)))
    assert len(signatures) == 4
    assert all(signature == signatures[0] for signature in signatures)
    names = {row[0] for row in signatures[0]}
    assert any("grouped_mm" in name for name in names)
    assert not [name for name in names if "_local_scalar_dense" in name or "nonzero" in name]


def test_owners_without_adapters_are_made_on_the_device() -> None:
    """A graph holds what its operators make; what the host copies, a cache may drop."""
    with Recorder() as recorder:
        _, owners = owners_of((), 5, torch.device("cpu"), "experts.down_proj")
    made = {result.data_ptr() for _, _, _, result in recorder.calls}
    assert {owners.numbers.data_ptr(), owners.ends.data_ptr()} <= made
    assert (owners.numbers.tolist(), owners.ends.tolist()) == ([0] * 5, [5])


def test_graphs_of_mixtures_need_grouped_products(paged: Build, mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "cuda_capture", lambda: capture)
    for dtype, expected in (("bfloat16", capture), ("float32", None)):
        model = paged(mixture, dtype=dtype)._base.model
        on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), model=model)
        assert choice.step_capture(on_gpu) is expected
