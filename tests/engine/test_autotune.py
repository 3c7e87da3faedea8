"""How many tokens a micro-batch takes: what a token costs is what torch keeps for it, and memory bounds the rest."""

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
def test_what_fits_a_quarter_of_the_memory_in_whole_steps(free: int, each: float, most: int, tokens: int):
    assert autotune.tokens_that_fit(free, each, most) == tokens
    assert tokens == autotune.MIN_TOKENS or tokens * each <= free / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_token_costs_what_a_pass_keeps_for_each(kind: str, dtype: str, engine_of: Any):
    """At least the inputs of every product of 3 layers of width 96 and 208, at most twice that."""
    trainer = engine_of(kind, dtype=dtype).trainer
    base, router = trainer._base, trainer._router
    itemsize = torch.tensor([], dtype=base.dtype).element_size()
    heads = base.model.config.head_dim * 4
    layer = itemsize * (96 + 3 * heads + 96 + 3 * 208)
    least = 3 * layer + base.card.vocab_size * itemsize
    found = autotune.activation_bytes_per_token(base, router)
    assert least <= found <= 2 * least


def test_layers_that_compute_again_cost_less(engine_of: Any):
    trainer = engine_of("llama").trainer
    kept = autotune.activation_bytes_per_token(trainer._base, trainer._router)
    with trainer._switch.set(True):
        again = autotune.activation_bytes_per_token(trainer._base, trainer._router)
    head = trainer._base.card.vocab_size * 4
    assert again - head < (kept - head) / 4


def test_the_card_tells_what_was_chosen(engine_of: Any):
    assert engine_of("llama").card.pass_tokens == 1024
    assert engine_of("llama", sharing="latency").card.pass_tokens == 512
    assert engine_of("llama", pass_tokens=96).card.pass_tokens == 96


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_results_do_not_depend_on_it(loss_fn: str, pair: Any, wait: Any):
    """The same requests, of one model and of two, whole in one micro-batch, in some, and a row in each."""
    found = []
    for pass_tokens in ("auto", 64, 1):
        (engine, one, _), (_, two, _) = (pair(pass_tokens=pass_tokens) for _ in range(2))
        requests = [pass_for(loss_fn, one, seed=1), pass_for(loss_fn, two, seed=2)]
        found.append((wait(engine.run(requests)), gradients_of(engine, one), gradients_of(engine, two)))
    wanted, *rest = found
    for results, *gradients in rest:
        for result, expected in zip(results, wanted[0], strict=True):
            assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
            for left, right in zip(result.logprobs, expected.logprobs, strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)
        for gradient, expected in zip(gradients, wanted[1:], strict=True):
            assert_same(gradient, expected, tolerance=5e-5)


def test_it_is_a_number_or_auto():
    assert build(EngineConfig, {"pass_tokens": 96}, "here").pass_tokens == 96
    for wrong in (0, "many"):
        with pytest.raises(ConfigError, match="pass_tokens"):
            build(EngineConfig, {"pass_tokens": wrong}, "here")


def machine(root: Path, available: int, groups: str, files: Mapping[str, str] | None = None) -> Path:
    """A root folder as Linux shows it."""
    meminfo = f"MemTotal: 9 kB\nMemAvailable: {available} kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": groups, **(files or {})}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_free_memory_is_what_the_machine_has_and_every_limit_leaves(tmp_path: Path):
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


def test_this_machine_has_some():
    assert 0 < free_bytes() < 2**50
