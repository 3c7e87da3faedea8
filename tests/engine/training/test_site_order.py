"""Optimizer state saved on one path and loaded on the other, and from a file with its sites in another order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.architectures import save_tiny
from tests.engine.data import pass_for
from tinsmith.engine.base import AdamParams, LoraSpec
from tinsmith.engine.config import EngineConfig

SPEC = LoraSpec(rank=2, seed=5)
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def moments_of(engine: Any, model_id: str) -> Pairs:
    """exp_avg of A and B by site."""
    model = engine.trainer._model(model_id)
    return {
        name: (pair.a.clone(), pair.b.clone()) for name, pair in model.layout.pairs(model.moments().exp_avg).items()
    }


def assert_equal(actual: Pairs, expected: Pairs) -> None:
    assert actual.keys() == expected.keys()
    for name, pair in expected.items():
        assert all(torch.equal(*tensors) for tensors in zip(actual[name], pair, strict=True)), name


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_moments_are_at_their_sites_on_both_paths(kind: str, tmp_path: Path, wait: Callable[..., Any]) -> None:
    from tinsmith.engine.build import build

    folder, engines = save_tiny(kind, tmp_path / "base"), []
    for path in ("fast", "general"):
        config = EngineConfig(source=str(folder), dtype="float32", device="cpu", threads=1, path=path)
        engines.append(build(config))
    fast, general = engines
    wait(fast.create("m", SPEC))
    wait(fast.run([pass_for("cross_entropy", "m", seed=1)]))
    wait(fast.step("m", AdamParams(learning_rate=0.01)))
    wait(fast.save("m", tmp_path / "saved", optimizer=True))
    wait(general.load("m", tmp_path / "saved", optimizer=True))
    assert_equal(moments_of(general, "m"), moments_of(fast, "m"))
    wait(fast.create("new", SPEC))
    wait(general.create("new", SPEC))
    layouts = [engine.trainer._model("new").layout for engine in engines]
    # Qwen3-Next fuses z with q, k and v; only the order within a layer counts here.
    assert [site.name for site in layouts[0].sites] == [site.name for site in layouts[1].sites]
    assert torch.equal(*(engine.trainer._model("new").master for engine in engines))

    # A file whose sites are in another order, as a later transformers may have its modules.
    file = tmp_path / "saved" / "optimizer.safetensors"
    names = [site.name for site in layouts[0].sites][::-1]
    pairs = layouts[0].pairs
    with safe_open(file, "pt") as saved:
        assert json.loads(saved.metadata()["sites"]) == names[::-1]
    state = load_file(file)
    for part in ("exp_avg", "exp_avg_sq"):
        by_name = pairs(state[part])
        state[part] = torch.cat([tensor.flatten() for name in names for tensor in (by_name[name].a, by_name[name].b)])
    save_file(state, file, metadata={"sites": json.dumps(names)})
    wait(general.load("reordered", tmp_path / "saved", optimizer=True))
    assert_equal(moments_of(general, "reordered"), moments_of(fast, "m"))
    for engine in engines:
        wait(engine.close())
