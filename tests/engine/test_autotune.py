"""Tokens of a micro-batch: measured activation bytes and free memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from tests.engine.data import LOSSES, pass_for
from tests.engine.inspection import gradients_of
from tests.engine.reference import assert_same
from tinsmith.engine import autotune, model_facts
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.cpu.instructions import cpu_bfloat16
from tinsmith.engine.model import footprint, loading
from tinsmith.engine.model.memory import free_bytes, total_bytes
from tinsmith.engine.sampling.kv_cache import cache_shape
from tinsmith.engine_options import CPU_CACHE_TOKENS
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
def test_bytes_of_a_token_are_those_of_the_cache(kind: str, dtype: str, engine_of: Any):
    base = engine_of(kind, dtype=dtype).trainer._base
    assert model_facts.token_bytes(base.model.config, base.dtype) == cache_shape(base).token_bytes


def test_cache_takes_a_quarter_of_free_memory_at_most(monkeypatch: pytest.MonkeyPatch):
    def tokens(free: int, each: int = 1000, **options: Any) -> int:
        monkeypatch.setattr(autotune, "free_bytes", lambda: free)
        return autotune.resolve_cache_tokens(EngineConfig(source="tiny", **options), None, each)

    assert tokens(20_000_000) == 5000
    assert tokens(20_000_000 - 1) == 4999
    assert tokens(1 << 50) == CPU_CACHE_TOKENS
    assert tokens(0) == autotune.MIN_CACHE_TOKENS
    assert tokens(0, each=0) == CPU_CACHE_TOKENS
    assert tokens(0, cache_tokens=7) == 7
    assert tokens(0, deterministic=True) == CPU_CACHE_TOKENS  # nothing may depend on the memory that happens to be free


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_activation_bytes_match_the_saved_tensors(kind: str, dtype: str, engine_of: Any):
    """At least the inputs of all products of 2 layers of width 96 and 208, but for the last of each, which is computed
    again from two of these; at most twice that."""
    trainer = engine_of(kind, dtype=dtype).trainer
    base, active = trainer._base, trainer._runner._active
    itemsize = torch.tensor([], dtype=base.dtype).element_size()
    heads = base.model.config.head_dim * 4
    layer = itemsize * (96 + 3 * heads + 96 + 2 * 208)
    least = 2 * layer + base.card.vocab_size * itemsize
    measured = autotune.activation_bytes_per_token(base, active)
    assert least <= measured <= 2 * least


def test_recomputing_layers_save_fewer_bytes(engine_of: Any):
    trainer = engine_of("llama").trainer
    saved = autotune.activation_bytes_per_token(trainer._base, trainer._runner._active)
    with trainer._runner._switch.set(True):
        recomputed = autotune.activation_bytes_per_token(trainer._base, trainer._runner._active)
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
            # A sum of ratios: each is as exact as its logprob, 5e-6, and they partly cancel.
            assert result.metrics == pytest.approx(expected.metrics, rel=2e-5)
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


@pytest.mark.parametrize(
    ("vendor", "flags", "tiles", "has_bfloat16", "speed"),
    [
        ("GenuineIntel", "avx512_bf16 avx512_fp16", False, True, "slow"),
        ("GenuineIntel", "avx512_bf16 avx512_fp16", True, True, "fast"),
        ("GenuineIntel", "avx512_bf16", False, True, "fast"),
        ("AuthenticAMD", "avx512_bf16 avx512_fp16", False, True, "fast"),
        ("GenuineIntel", "avx2", False, False, "emulated"),
    ],
)
def test_speed_of_bfloat16_is_read_from_the_processor(
    vendor: str,
    flags: str,
    tiles: bool,
    has_bfloat16: bool,
    speed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    cpu = {"proc/cpuinfo": f"vendor_id : {vendor}\nflags : fpu {flags} sse\n"}
    assert cpu_bfloat16(machine(tmp_path, 1, "", cpu)) == speed


def test_undescribed_cpu_is_as_fast_as_its_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert cpu_bfloat16(tmp_path) == "fast"


def test_float32_where_it_is_faster_and_fits(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    settings, device = AutoConfig.from_pretrained(tiny_llama), torch.device("cpu")
    size = footprint.footprint(settings, torch.float32, device, four_bit=False).weights
    for speed, memory, dtype in (
        ("slow", 8 * size, torch.float32),
        ("slow", 8 * size - 1, torch.bfloat16),
        ("fast", 100 * size, torch.bfloat16),
        ("emulated", size, torch.float32),
    ):
        monkeypatch.setattr(loading, "cpu_bfloat16", lambda speed=speed: speed)
        monkeypatch.setattr(loading, "total_bytes", lambda memory=memory: memory)
        assert loading.dtype_of("auto", device, settings) is dtype
        assert loading.dtype_of("bfloat16", device, settings) is torch.bfloat16


def test_total_bytes_are_those_of_the_machine_or_of_its_limits(tmp_path: Path):
    assert total_bytes(machine(tmp_path / "bare", 1, "0::/\n")) == 9 * 1024
    limited = {"sys/fs/cgroup/a/memory.max": "5000\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}
    assert total_bytes(machine(tmp_path / "limited", 1, "0::/a/b\n", limited)) == 5000


def test_memory_of_this_machine_is_plausible():
    assert 0 < free_bytes() < total_bytes() < 2**50
