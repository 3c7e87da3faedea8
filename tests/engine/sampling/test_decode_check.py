"""The check of decoding at load refuses a model whose cache or states are wrong, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.architectures import save_tiny
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.sampling import batch, state_bank
from tinsmith.engine.sampling.decode import DecodeAttention
from tinsmith.errors import Unsupported


def build(folder: Path) -> Any:
    from tinsmith.engine.build import build as build_engine

    return build_engine(EngineConfig(source=str(folder), dtype="float32", device="cpu", threads=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_5_text", tmp_path_factory.mktemp("hybrid"))


def test_correct_cache_passes_and_is_empty_afterwards(folder: Path, wait: Callable[..., Any]) -> None:
    engine = build(folder)
    assert engine.sampler.batch.kv_cache.tokens == 0
    assert engine.sampler.batch.kv_cache.states.rows == []
    wait(engine.close())


def test_states_that_do_not_advance_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = state_bank.delta_step
    monkeypatch.setattr(state_bank, "delta_step", lambda *inputs: step(*inputs[:-1], inputs[-1].clone()))
    with pytest.raises(Unsupported, match=r"qwen3_5_text\) does not continue rows from the cache exactly"):
        build(folder)


def test_cache_whose_rows_do_not_grow_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeAttention, "advance", lambda _: None)
    with pytest.raises(Unsupported, match="does not continue rows from the cache exactly"):
        build(folder)


def test_loop_that_fails_is_not_used(
    folder: Path, wait: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(batch, "attention_function", lambda _: fail)
    engine = build(folder)
    assert engine.sampler.batch.attention_function is None
    assert "The compiled attention does not work here" in caplog.text
    wait(engine.close())
