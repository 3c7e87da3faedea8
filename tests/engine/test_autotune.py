"""Tokens of a micro-batch: measured activation bytes and free memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.data import LOSSES, pass_for
from tests.engine.inspection import gradients_of
from tests.engine.reference import assert_same
from tinsmith.engine import autotune
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model import loading
from tinsmith.engine.model.memory import free_bytes
from tinsmith.errors import ConfigError
from tinsmith.settings import build

GB = 10**9


@pytest.mark.parametrize(
    ("free", "each", "most", "tokens"),
    [
        (16 * GB, 0.8e6, 1024, 1024),
        (2 * GB, 0.8e6, 1024, 512),
        (0, 0.8e6, 1024, 256),
        (120 * GB, 5.6e6, 8192, 5248),
        (16 * GB, 3.4e6, 8192, 1152),
    ],
)
def test_tokens_that_fit_use_a_quarter_of_free_memory(free: int, each: float, most: int, tokens: int):
    assert autotune.tokens_that_fit(free, each, most) == tokens
    assert tokens == autotune.MIN_PASS_TOKENS or tokens * each <= free / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_activation_bytes_match_the_saved_tensors(kind: str, dtype: str, engine_of: Any):
    """At least the inputs of all products of 3 layers of width 96 and 208, and at most twice that."""
    trainer = engine_of(kind, dtype=dtype).trainer
    base, active = trainer._base, trainer._active
    itemsize = torch.tensor([], dtype=base.dtype).element_size()
    heads = base.model.config.head_dim * 4
    layer = itemsize * (96 + 3 * heads + 96 + 3 * 208)
    least = 3 * layer + base.card.vocab_size * itemsize
    measured = autotune.activation_bytes_per_token(base, active)
    assert least <= measured <= 2 * least


def test_recomputing_layers_save_fewer_bytes(engine_of: Any):
    trainer = engine_of("llama").trainer
    saved = autotune.activation_bytes_per_token(trainer._base, trainer._active)
    with trainer._switch.set(True):
        recomputed = autotune.activation_bytes_per_token(trainer._base, trainer._active)
    head = trainer._base.card.vocab_size * 4
    assert recomputed - head < (saved - head) / 4


def test_card_shows_pass_tokens(engine_of: Any):
    assert engine_of("llama").card.pass_tokens == 1024
    assert engine_of("llama", sharing="latency").card.pass_tokens == 512
    assert engine_of("llama", pass_tokens=96).card.pass_tokens == 96


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_results_are_independent_of_pass_tokens(loss_fn: str, pair: Any, wait: Any):
    """Requests of two models in one micro-batch, in several, and with one row in each."""
    runs = []
    for pass_tokens in ("auto", 64, 1):
        (engine, first, _), (_, second, _) = (pair(pass_tokens=pass_tokens) for _ in range(2))
        requests = [pass_for(loss_fn, first, seed=1), pass_for(loss_fn, second, seed=2)]
        runs.append((wait(engine.run(requests)), gradients_of(engine, first), gradients_of(engine, second)))
    wanted, *rest = runs
    for results, *gradients in rest:
        for result, expected in zip(results, wanted[0], strict=True):
            assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
            for left, right in zip(result.logprobs, expected.logprobs, strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)
        for gradient, expected in zip(gradients, wanted[1:], strict=True):
            assert_same(gradient, expected, tolerance=5e-5)


def test_pass_tokens_rejects_other_than_number_or_auto():
    assert build(EngineConfig, {"pass_tokens": 96}, "here").pass_tokens == 96
    for wrong in (0, "many"):
        with pytest.raises(ConfigError, match="pass_tokens"):
            build(EngineConfig, {"pass_tokens": wrong}, "here")


def machine(root: Path, available: int, groups: str, files: Mapping[str, str] | None = None) -> Path:
    """A root folder with the files that Linux provides."""
    meminfo = f"MemTotal: 9 kB\nMemAvailable: {available} kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": groups, **(files or {})}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_free_bytes_respect_machine_and_cgroup_limits(tmp_path: Path):
    assert free_bytes(machine(tmp_path / "bare", 1000, "0::/\n")) == 1000 * 1024
    limited = {
        "sys/fs/cgroup/a/memory.max": "700000\n",
        "sys/fs/cgroup/a/memory.current": "500000\n",
        "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 100000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
    }
    assert free_bytes(machine(tmp_path / "two", 1000, "0::/a/b\n", limited)) == 300_000
    first = {
        "sys/fs/cgroup/memory/c/memory.limit_in_bytes": "90000",
        "sys/fs/cgroup/memory/c/memory.usage_in_bytes": "100000",
        "sys/fs/cgroup/memory/c/memory.stat": "cache 7\n",
    }
    assert free_bytes(machine(tmp_path / "one", 1000, "5:cpu:/c\n4:memory:/c\n", first)) == 0


def test_bfloat16_only_where_a_gpu_has_it(monkeypatch: pytest.MonkeyPatch):
    for native, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native)
        assert loading.dtype_of("auto", torch.device("cuda")) is dtype


def test_free_bytes_of_this_machine_are_plausible():
    assert 0 < free_bytes() < 2**50
