"""What other processes compile before a model is read is what the model calls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")
from transformers import AutoConfig

from tests.models import KINDS
from tinsmith.engine.build import build
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.cpu.compiling import Compilation


def built(folder: Path, dtype: str = "float32") -> Any:
    return build(EngineConfig(source=str(folder), dtype=dtype, device="cpu", threads=1, path="fast"))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", KINDS)
def test_attention_is_compiled_for_the_heads_of_the_model(
    family: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = list[tuple[str, int, int]]()
    monkeypatch.setattr(Compilation, "start_decoding", lambda _, *arguments: heads.append(arguments))
    config = AutoConfig.from_pretrained(tiny(family))
    shape = built(tiny(family)).sampler.batch.kv_cache.shape
    assert shape.key_width == shape.value_width
    assert heads == [("float32", config.num_attention_heads // shape.heads, shape.key_width)]


PROGRAM = """
import asyncio, sys
import torch
from numba.core.dispatcher import Dispatcher
from tests.engine.data import pass_for
from tests.engine.sampling.helpers import sample_request
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.build import build
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.cpu import loops
from tinsmith.engine.cpu.instructions import kind_of

def signatures():
    return {name: {*loop.signatures} for name, loop in vars(loops).items() if isinstance(loop, Dispatcher)}

async def use(engine):
    await engine.create("model", LoraSpec(rank=8, seed=0))
    await engine.run([pass_for("cross_entropy", "model")])
    await engine.sample(sample_request())
    await engine.close()

source, dtype = sys.argv[1:]
loops.compile_loops(kind_of(getattr(torch, dtype)))
compiled = signatures()
asyncio.run(use(build(EngineConfig(source=source, dtype=dtype, device="cpu", threads=1))))
assert compiled["norm_rows"]
assert signatures() == compiled
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_call_loops_that_are_compiled(dtype: str, tiny_llama: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny_llama), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
