"""The gated delta rule by kernels: plain ones, the choice at load, and Triton's in its interpreter and compiled."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import override

from tests.engine.model.hybrid.plain_rule import PlainRule
from tests.engine.triton_programs import needs_triton, run_python
from tinsmith.engine.model.hybrid.chunk_rule import HeadShape, chunk_rule
from tinsmith.engine.model.hybrid.chunk_tensors import ChunkTensors
from tinsmith.engine.model.hybrid.chunk_tree import chunk_tree
from tinsmith.engine.model.hybrid.rule import choice
from tinsmith.engine.model.hybrid.rule.fused import RuleInputs, fused_rule

CPU, SHAPE = torch.device("cpu"), HeadShape(2, 8, 4, 6)
CASES = "tests.engine.model.hybrid.rule_cases"


@pytest.mark.parametrize("stem", choice.STEMS)
def test_rule_over_plain_kernels_is_the_rule(stem: int) -> None:
    choice.check(PlainRule(), CPU, torch.float32, SHAPE, stem)


@settings(max_examples=10, deadline=None)
@given(st.data(), st.integers(1, 60))
def test_rule_on_random_trees_equals_chunk_rule(data: st.DataObject, count: int) -> None:
    """Any forks, roots, ends and outside states, with all gradients."""
    backs = data.draw(st.lists(st.sampled_from([1, 1, 1, 1, 1, 1, 2, 5, 99]), min_size=count, max_size=count))
    parents = np.array([max(number - back, -1) for number, back in enumerate(backs)])
    roots = [int(root) for root in np.flatnonzero(parents < 0)][:2]
    starts = {root: number for number, root in enumerate(data.draw(st.sampled_from([roots, roots[:1], []])))}
    ends = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=3))
    tree = ChunkTensors.of(chunk_tree(parents, 1, starts=starts, ends=ends), CPU)
    draw = torch.Generator().manual_seed(count)
    rows = torch.randn(count, 2 * SHAPE.keys + 24, generator=draw)
    decay, beta = -torch.rand(count, 4, generator=draw), torch.rand(count, 4, generator=draw)
    outside = torch.randn(len(starts), 4, 8, 6, generator=draw) if starts else None
    results: list[list[Tensor]] = []
    for rule in (chunk_rule, partial(fused_rule, PlainRule())):
        leaves = [part.clone().requires_grad_() for part in (rows, decay, beta)]
        slots = leaves[0][tree.inputs].view(-1, tree.size, rows.shape[1])
        output, states = rule(slots, leaves[1], leaves[2], SHAPE, tree, outside)
        grads = torch.autograd.grad((output * output.sin()).sum() + states.square().sum(), leaves)
        results.append([output, states, *grads])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


class WrongDecays(PlainRule):
    @override
    def product_gradients(self, inputs: RuleInputs, products: Tensor, beta_grad: Tensor) -> Tensor:
        return super().product_gradients(inputs, products, beta_grad) * 1.02


class NotCompiled(PlainRule):
    @override
    def scan(self, inputs: RuleInputs, correction: Tensor, added: Tensor, states: Tensor) -> None:
        raise RuntimeError("no compiler")


def test_cpu_has_no_kernels() -> None:
    assert choice.kernels_on(CPU) is None
    assert choice.rule_on(CPU, torch.float32, SHAPE) is chunk_rule


@pytest.mark.parametrize(("kernels", "works"), [(PlainRule, True), (WrongDecays, False), (NotCompiled, False)])
def test_kernels_of_other_results_are_not_used(
    kernels: type[PlainRule], works: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "kernels_on", lambda _: kernels())
    with caplog.at_level(logging.WARNING):
        rule = choice.rule_on(CPU, torch.float32, SHAPE)
    assert (rule is not chunk_rule) == works
    assert ("Gated DeltaNet do not work" in caplog.text) != works


@needs_triton
def test_interpreted_kernels_are_the_rule() -> None:
    run_python("-m", CASES, "interpreted", interpret=True)


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_are_the_rule_at_length() -> None:
    run_python("-m", CASES, "interpreted_at_length", interpret=True)


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_ampere_and_hopper() -> None:
    run_python("-m", CASES, "compiled", interpret=False)
