"""Experts as grouped products give what the loop over experts gives, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.engine.lora.experts.stacks import KINDS, adapter_of, routing_of, stack_of, using
from tests.engine.lora.test_grouped_adapters import aligned_grouped_mm
from tinsmith.engine.lora import grouped_adapters
from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair
from tinsmith.engine.lora.experts import grouped
from tinsmith.engine.lora.experts.install import expert_outputs

HIDDEN, WIDTH, EXPERTS, CHOSEN = 24, 16, 7, 3
TOLERANCE = 1e-5
"""In float32, of the largest number."""

Span = tuple[int, int, int]
"""Tokens without an adapter before it, its own tokens, and the number of its adapter."""
ADAPTERS = ((4, False), (8, False), (9, False), (8, True), (3, True))
"""Ranks, and whether the experts share no matrix."""
SPANS = st.lists(
    st.tuples(st.sampled_from([0, 0, 2]), st.sampled_from([0, 1, 5]), st.integers(0, len(ADAPTERS) - 1)), max_size=6
)


def kernel(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
    """The grouped product with what a GPU refuses, and with sums of empty groups that are not written."""
    result = aligned_grouped_mm(left, right, offs=offs)
    if left.dim() == right.dim() == 2:
        result[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = float("nan")
    return result


def results(
    kind: str, spans: Sequence[Span], drawn: torch.dtype, dtype: torch.dtype, *, trains: bool = True
) -> list[Tensor]:
    """The output, the gradients of its inputs, and those of the adapters that serve tokens; values are drawn in one
    dtype and computed with in another."""
    stack = stack_of(kind, EXPERTS, drawn, HIDDEN, WIDTH)
    stack.module.to(dtype)
    adapters: dict[int, AdapterWeights] = {}
    placed, start = [], 0
    for before, length, number in spans:
        start += before
        if number not in adapters:
            rank, separate = ADAPTERS[number]
            weights = adapter_of(stack, rank, number, drawn, separate=separate)
            pairs = {name: LoraPair(pair.a.to(dtype), pair.b.to(dtype)) for name, pair in weights.pairs.items()}
            adapters[number] = AdapterWeights(0.5 + number % 2, pairs, weights.gradients)
        placed.append((adapters[number], start, start + length))
        start += length
    index, factors = routing_of(start + 1, EXPERTS, CHOSEN, skipped=2)
    draw = torch.Generator().manual_seed(5)
    hidden, grad = (torch.randn(start + 1, HIDDEN, generator=draw).to(drawn).to(dtype) for _ in range(2))
    leaves = hidden.requires_grad_(trains), factors.to(drawn).to(dtype).requires_grad_(trains)
    with using(stack, placed), torch.set_grad_enabled(trains):
        output = expert_outputs(stack.module, leaves[0], index, leaves[1])
    if not trains:
        return [output]
    output.backward(grad)
    buffers = [part for each in adapters.values() for pair in each.gradients.values() for part in (pair.a, pair.b)]
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None), *buffers]


def errors(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Errors by the largest number of a result."""
    pairs = zip(actual, exact, strict=True)
    return [float((left.float() - right).abs().max() / (right.abs().max() + 1e-3)) for left, right in pairs]


@given(spans=SPANS, kind=st.sampled_from(sorted(KINDS)), drawn=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(deadline=None, max_examples=40)
def test_groups_equal_the_loop(spans: list[Span], kind: str, drawn: torch.dtype):
    """In float32; in bfloat16 within twice the loop's error, or 2 %."""
    exact, loop = (results(kind, spans, drawn, dtype) for dtype in (torch.float32, drawn))
    with (
        patch.object(grouped_adapters, "has_grouped_products", lambda _: True),
        patch.object(functional, "grouped_mm", kernel),
    ):
        actual, sampled = (results(kind, spans, drawn, drawn, trains=trains) for trains in (True, False))
    assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in loop]
    assert torch.equal(sampled[0], actual[0])
    for error, of_loop in zip(errors(actual, exact), errors(loop, exact), strict=True):
        assert error <= (TOLERANCE if drawn == torch.float32 else max(0.02, 2 * of_loop))


def test_odd_widths_and_cpus_have_no_groups():
    aligned, odd = stack_of("gpt_oss", 4, torch.bfloat16, 24, 16), stack_of("gpt_oss", 4, torch.bfloat16, 24, 12)
    assert not grouped.serves(aligned)
    with patch.object(grouped_adapters, "has_grouped_products", lambda _: True):
        assert grouped.serves(aligned)
        assert not grouped.serves(odd)


@pytest.mark.parametrize("separate", [False, True])
def test_group_adapters_change_no_bit_of_another(separate: bool):
    stack = stack_of("qwen3_moe", EXPERTS, torch.bfloat16, HIDDEN, WIDTH)
    index, weights = routing_of(24, EXPERTS, CHOSEN)
    hidden = torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
    outputs = []
    for value in (0.1, float("nan")):
        ours, other = (adapter_of(stack, 8, seed, torch.bfloat16, separate=separate) for seed in (1, 2))
        for pair in other.pairs.values():
            pair.a.fill_(value)
        with (
            using(stack, [(ours, 0, 12), (other, 12, 24)]),
            patch.object(grouped_adapters, "has_grouped_products", lambda _: True),
        ):
            outputs.append(expert_outputs(stack.module, hidden, index, weights.bfloat16()))
    assert outputs[1][12:].isnan().all()
    assert torch.equal(outputs[0][:12], outputs[1][:12])
