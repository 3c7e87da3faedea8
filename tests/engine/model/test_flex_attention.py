"""FlexAttention over a whole tree gives the same as one call for each job, forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torchs

from tests.architectures import save_tiny
from tests.engine.data import pass_for
from tests.engine.sampling.helpers import sample_request
from tinsmith.engine import triton_support
from tinsmith.engine.base import LoraSpec, PassResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model import attention, flex_attention, loading, packing, precision, self_check
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.torch_engine import TorchEngine

CPU = torch.device("cpu")


def tree_of(rows: list[list[int]], adapters: list[int] | None = None) -> packing.PackedTree:
    adapters = adapters or [0] * len(rows)
    return packing.pack(
        [
            packing.PackedRow(key=key, adapter=adapter, tokens=np.array(row, np.int32))
            for key, (row, adapter) in enumerate(zip(rows, adapters, strict=True))
        ]
    )


def dense(tree: packing.PackedTree) -> np.ndarray:
    """The mask bool [T, T], computed from the rows."""
    visible = np.zeros((len(tree.tokens),) * 2, bool)
    for path in tree.index.values():
        for depth, position in enumerate(path):
            visible[position, path[: depth + 1]] = True
    return visible


rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=12)


@given(rows=rows, split=st.integers(0, 12))
@settings(deadline=None, max_examples=60)
def test_visible_until_defines_the_mask(rows: list[list[int]], split: int):
    tree = tree_of(rows, [int(number >= split) for number in range(len(rows))])
    until, at = flex_attention.visible_until(tree), np.arange(len(tree.tokens))
    np.testing.assert_array_equal((at <= at[:, None]) & (at[:, None] < until), dense(tree))


@given(rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=300), min_size=1, max_size=6))
@settings(deadline=None, max_examples=30)
def test_blocks_are_full_partial_or_empty(rows: list[list[int]]):
    tree = tree_of(rows)
    every = np.arange(len(tree.tokens))
    partial, full = flex_attention._blocks(every, every, flex_attention.visible_until(tree))
    visible = dense(tree)
    for (query, key), some in np.ndenumerate(partial):
        block = visible[
            query * flex_attention.BLOCK : (query + 1) * flex_attention.BLOCK,
            key * flex_attention.BLOCK : (key + 1) * flex_attention.BLOCK,
        ]
        assert full[query, key] <= block.all()
        assert (some or full[query, key]) >= block.any()
        assert not (some and full[query, key])
        assert block.any() or not full[query, key]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run FlexAttention uncompiled, which also works backward on a CPU."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


CASES: dict[str, Callable[[], packing.PackedTree]] = {
    "one row": lambda: tree_of([list(range(37))]),
    "a group": lambda: tree_of([[*range(140), *([k] * (20 + 30 * k))] for k in range(5)]),
    "turns": lambda: tree_of([list(range(length)) for length in (40, 90, 91, 200)]),
    "two tenants": lambda: tree_of([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [1, 2, 6]], [0, 0, 1, 1]),
    "nested": lambda: tree_of([[*range(n), *([900 + n + k] * 9)] for n in (50, 100, 150) for k in range(3)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("uncompiled")
def test_forward_and_backward_match_the_jobs(case: str):
    tree = CASES[case]()
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, heads, len(tree.tokens), 16) for heads in (6, 2, 2)]
    inputs = [torch.randn(shape, generator=draw) for shape in shapes]
    weight = torch.randn((1, len(tree.tokens), 6, 16), generator=draw)

    def results(context: attention.AttentionContext) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns that it is not compiled
            output = context.attend(0, leaves[0], leaves[1], leaves[2], AttentionRule(0.25))
        output.mul(weight).sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    expected = results(attention.packed_attention(tree, torch.float32, CPU))
    actual = results(flex_attention.packed_attention(tree, CPU))
    assert len(actual) == 4
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("uncompiled")
def test_keys_and_values_are_saved_for_the_sampler():
    tree = CASES["a group"]()
    context = flex_attention.packed_attention(tree, CPU, save_kv=True)
    key, value = torch.randn(2, 1, 2, len(tree.tokens), 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context.attend(0, torch.randn(1, 4, len(tree.tokens), 16), key, value, AttentionRule(0.25))
    assert context.saved_kv[0][0] is key
    assert context.saved_kv[0][1] is value


def test_flex_attention_needs_gpu_and_triton(monkeypatch: pytest.MonkeyPatch):
    def supported(capability: tuple[int, int] = (9, 0), device: str = "cuda", triton: Any = True) -> bool:
        monkeypatch.setattr(triton_support, "find_spec", lambda _: triton)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        return flex_attention.is_supported(torch.device(device))

    assert supported()
    assert not supported(device="cpu")
    assert not supported(capability=(7, 5))
    assert not supported(triton=None)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine takes FlexAttention as on a GPU, with a compiler that compiles nothing."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "is_supported", lambda _: True)
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False, specialize_float=False):
        torch._dynamo.reset()
        monkeypatch.setattr(flex_attention, "flex_attention", flex_attention._compiled.__wrapped__("eager"))
        yield
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)


TWO = {"num_hidden_layers": 2}
VARIANTS = {"plain": ("llama", TWO, 8), "windows": ("gemma3_text", TWO, 16), "deterministic": ("llama", TWO, 16)}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.filterwarnings("ignore")  # of tracing
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "plain" else pytest.mark.slow) for case in VARIANTS]
)
def test_few_variants_are_compiled_and_all_at_load(
    case: str, tmp_path: Path, wait: Any, monkeypatch: pytest.MonkeyPatch
):
    kind, changes, most = VARIANTS[case]
    if case == "deterministic":
        monkeypatch.setattr(precision, "use_deterministic_kernels", lambda _: torch.use_deterministic_algorithms(True))
    source = str(save_tiny(kind, tmp_path, max_position_embeddings=1024, **changes))
    before = graphs()
    config = EngineConfig(
        source=source, dtype="bfloat16", device="cpu", threads=1, deterministic=case == "deterministic"
    )
    engine = TorchEngine(config)
    assert engine._base.flex_attention
    at_load = graphs() - before
    assert 0 < at_load <= most <= flex_attention.MAX_VARIANTS / 2
    wait(engine.create("m", LoraSpec(rank=4, seed=0)))
    for lengths in ((1,), (90, 200), (300, 129), (2, 3)):
        (result,) = wait(engine.run([pass_for("ppo", "m", lengths=lengths)]))
        assert isinstance(result, PassResult)
        wait(engine.run([pass_for("cross_entropy", "m", lengths=lengths, forward_only=True)]))
        wait(engine.sample(sample_request(np.arange(3, 3 + lengths[0]), max_tokens=2)))
    for turn in (1, 30, 200):  # after what the longest of them has cached
        wait(engine.sample(sample_request([*range(3, 303), *range(7, 7 + turn)], max_tokens=2)))
    assert graphs() - before == at_load
    assert torch._dynamo.config.recompile_limit == flex_attention.MAX_VARIANTS
    assert torch._dynamo.config.fail_on_recompile_limit_hit


def graphs() -> int:
    """Graphs that torch has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_attention_that_does_not_compile_is_computed_by_jobs(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, tiny_llama: Path
):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(flex_attention, "is_supported", lambda _: True)
    monkeypatch.setattr(flex_attention, "flex_attention", broken)
    base = loading.load(EngineConfig(source=str(tiny_llama), dtype="float32", device="cpu"))
    assert not base.flex_attention
    assert "slower" in caplog.text
    assert "no compiler" in caplog.text


def test_cudnn_attention_is_off_before_a_model_computes(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path):
    seen: list[bool] = []

    def first_pass(base: BaseModel) -> BaseModel:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return base

    torch.backends.cuda.enable_cudnn_sdp(True)
    monkeypatch.setattr(self_check, "with_flex_attention", first_pass)
    loading.load(EngineConfig(source=str(tiny_llama), dtype="float32", device="cpu"))
    assert seen == [False]
