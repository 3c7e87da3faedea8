"""The experts of mixtures with adapters, against transformers' own experts on merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.cpu.processor import needs_pairs
from tests.engine.lora.experts.stacks import HIDDEN, adapter_of, routing_of, stack_of, using
from tinsmith.engine.lora.adapter import AdapterWeights, PlacedAdapter
from tinsmith.engine.lora.experts import compiled, loops, pairs
from tinsmith.engine.lora.experts.install import expert_outputs
from tinsmith.engine.lora.experts.pairs import padded_count, sort_pairs
from tinsmith.engine.lora.experts.stack import ExpertStack
from tinsmith.engine.lora.targets import expert_target
from tinsmith.engine.model.support import is_expert_stack


def _merged(
    stack: ExpertStack, hidden: Tensor, index: Tensor, weights: Tensor, adapter: AdapterWeights | None
) -> Tensor:
    """Transformers' eager experts with s B A added to the weights."""
    module = stack.module
    up, down = ("gate_up_proj" if stack.gated else "up_proj"), "down_proj"
    changed = {up: getattr(module, up), down: module.down_proj}
    if adapter is not None:
        deltas = {name.rpartition(".")[2]: adapter.scale * pair.b @ pair.a for name, pair in adapter.pairs.items()}
        parts = [deltas["w1"], deltas["w3"]] if stack.gated else [deltas["w1"]]
        wide = torch.cat(parts, 1) if stack.concatenated else torch.stack(parts, 2).flatten(1, 2)
        turn = (lambda m: m.mT) if stack.transposed else (lambda m: m)
        changed = {up: changed[up] + turn(wide), down: changed[down] + turn(deltas["w2"])}
    return torch.func.functional_call(module, changed, (hidden, index, weights))


CASES = [("qwen3_moe", 7, 3), ("gpt_oss", 7, 3), ("nemotron_h", 7, 3), ("qwen3_moe", 1, 1), ("gpt_oss", 4, 4)]


@pytest.mark.parametrize(("kind", "experts", "k"), CASES)
def test_outputs_and_gradients_equal_merged_weights(kind: str, experts: int, k: int) -> None:
    stack = stack_of(kind, experts)
    tokens, skipped = 23, 2 if experts > k else 0
    index, weights = routing_of(tokens, experts, k, skipped)
    adapters = [adapter_of(stack, 4, 1), adapter_of(stack, 9, 2)]
    spans = [(adapters[0], 0, 9), (adapters[1], 11, 23)]
    draw = torch.Generator().manual_seed(5)
    hidden, grad = (torch.randn(tokens, HIDDEN, generator=draw, dtype=torch.float64) for _ in range(2))
    inputs = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    with using(stack, spans):
        output = expert_outputs(stack.module, inputs[0], index, inputs[1])
        output.backward(grad)
    leaves = [p for adapter in adapters for pair in adapter.pairs.values() for p in (pair.a, pair.b)]
    expected_inputs = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    for leaf in leaves:
        leaf.requires_grad_()
    expected = torch.cat(
        [
            _merged(stack, expected_inputs[0][rows], index[rows], expected_inputs[1][rows], adapter)
            for adapter, rows in ((adapters[0], slice(0, 9)), (None, slice(9, 11)), (adapters[1], slice(11, 23)))
        ]
    )
    expected.backward(grad)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(inputs, expected_inputs, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)
    buffers = [p for adapter in adapters for pair in adapter.gradients.values() for p in (pair.a, pair.b)]
    for buffer, leaf in zip(buffers, leaves, strict=True):
        torch.testing.assert_close(buffer, leaf.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_sampling_computes_what_training_computes(tokens: int) -> None:
    """One token, and many, so that both forms of an adapter's products are used."""
    stack = stack_of("qwen3_moe", 7)
    index, weights = routing_of(tokens, 7, 3)
    adapter = adapter_of(stack, 4, 1)
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    with using(stack, [(adapter, 0, tokens)]), torch.no_grad():
        output = expert_outputs(stack.module, hidden, index, weights)
    torch.testing.assert_close(output, _merged(stack, hidden, index, weights, adapter), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_changes_no_bit_of_another(dtype: torch.dtype) -> None:
    stack = stack_of("qwen3_moe", 7, dtype)
    index, weights = routing_of(24, 7, 3)
    hidden = torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(5)).to(dtype)
    results = []
    for value in (0.1, float("nan")):
        ours, other = adapter_of(stack, 4, 1, dtype), adapter_of(stack, 9, 2, dtype)
        for pair in other.pairs.values():
            pair.a.fill_(value)
        results.append(_run(stack, hidden, index, weights.to(dtype), [(ours, 0, 12), (other, 12, 24)]))
    assert results[1][0][12:].isnan().all()
    for alone, beside_nan in zip(results[0][1:], results[1][1:], strict=True):
        assert torch.equal(alone, beside_nan)


def _run(
    stack: ExpertStack, hidden: Tensor, index: Tensor, weights: Tensor, placed: Sequence[PlacedAdapter]
) -> list[Tensor]:
    """The output, and all that belongs to the first adapter: its rows, their gradients, its gradients."""
    leaf = hidden.clone().requires_grad_()
    with using(stack, placed):
        output = expert_outputs(stack.module, leaf, index, weights)
        output.backward(torch.ones_like(output))
    first, start, stop = placed[0]
    assert leaf.grad is not None
    grads = [tensor for pair in first.gradients.values() for tensor in (pair.a, pair.b)]
    return [output.detach(), output[start:stop].detach(), leaf.grad[start:stop], *grads]


SPANS = {"two adapters, each group a multiple of 4": [(0, 13), (15, 40)], "one adapter, all experts alike": [(0, 40)]}


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_padded_pairs_change_nothing(
    kind: str, spans: list[tuple[int, int]], separate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the experts has no pair."""
    stack = stack_of(kind, 7)
    index, weights = routing_of(40, 7, 3, 1)
    hidden = torch.randn(40, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(pairs, "padded_count", lambda count: -(-count // 4) * 4)
    results, blocks = [], []
    for pads in (False, True):

        def sort(
            _: Tensor, index: Tensor, stack: ExpertStack, placed: Sequence[PlacedAdapter], pads: bool = pads
        ) -> Any:
            result = sort_pairs(index, placed, experts=stack.count if pads else 0, pads=pads)
            blocks.append(result.block)
            return result

        monkeypatch.setattr(loops, "_sorted", sort)
        adapters = [adapter_of(stack, 4 + number, number, separate=separate) for number in range(len(spans))]
        placed = [(adapter, *span) for adapter, span in zip(adapters, spans, strict=True)]
        results.append(_run(stack, hidden, index, weights, placed))
    assert [block > 0 for block in blocks] == [False, len(spans) == 1]
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)


@needs_pairs
@pytest.mark.parametrize("ranks", [(4, 5), (8, 24)], ids=["adapters by products", "adapters compiled"])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "spans"), [(40, 7, [(0, 13), (15, 40)]), (700, 3, [(0, 700)])])
@pytest.mark.parametrize("kind", ["qwen3_moe", "nemotron_h"])
def test_laid_out_experts_compute_what_their_matrices_do(
    kind: str, tokens: int, experts: int, spans: list[tuple[int, int]], separate: bool, ranks: tuple[int, int]
) -> None:
    """One of the experts has no pair."""
    index, weights = routing_of(tokens, experts, 2, 1)
    hidden = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    results, sites = [], []
    for laid_out in (False, True):
        stack = stack_of(kind, experts, torch.bfloat16, hidden=64, width=32)
        if laid_out:
            stack.lay_out()
            assert stack.panels is not None
            assert stack.down_weights.isnan().all()  # nothing reads them
        adapters = [adapter_of(stack, rank, rank, torch.bfloat16, separate=separate) for rank in ranks]
        placed = [(adapter, *span) for adapter, span in zip(adapters, spans, strict=False)]
        assert compiled.serves(stack, placed) == (laid_out and ranks[0] == 8)
        results.append(_run(stack, hidden, index, weights.bfloat16(), placed))
        sites.append([site.shapes(4) for site in expert_target(stack.name, stack.module).sites])
    assert sites[0] == sites[1]
    for plain, laid_out in zip(*results, strict=True):
        assert (laid_out.float() - plain.float()).norm() < 1e-2 * plain.float().norm()


@needs_pairs
def test_laid_out_experts_give_the_same_bits_in_any_company() -> None:
    index, weights = routing_of(90, 7, 3)
    hidden = torch.randn(90, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    stack = stack_of("qwen3_moe", 7, torch.bfloat16, hidden=64, width=32)
    stack.lay_out()
    adapter, other = (adapter_of(stack, rank, rank, torch.bfloat16) for rank in (8, 16))
    with using(stack, [(adapter, 0, 50), (other, 50, 90)]):
        together = expert_outputs(stack.module, hidden, index, weights.bfloat16())
    for number in range(50):
        own = slice(number, number + 1)
        with using(stack, [(adapter, 0, 1)]):
            alone = expert_outputs(stack.module, hidden[own], index[own], weights[own].bfloat16())
        assert torch.equal(alone, together[own])


@needs_pairs
@pytest.mark.parametrize(("kind", "width"), [("gpt_oss", 32), ("qwen3_moe", 10)])
def test_experts_with_biases_or_other_widths_are_not_laid_out(kind: str, width: int) -> None:
    stack = stack_of(kind, 3, torch.bfloat16, hidden=64, width=width)
    stack.lay_out()
    assert stack.panels is None
    assert stack.down_weights.isfinite().all()


def test_few_numbers_of_rows_are_multiplied() -> None:
    rows = {1: 1, 8: 8, 15: 15, 17: 18, 31: 32, 33: 36, 100: 104, 129: 144, 1000: 1024}
    assert {count: padded_count(count) for count in rows} == rows
    index, _ = routing_of(2000, 7, 3)
    for _, start, stop in sort_pairs(index, [], pads=True).experts:
        assert padded_count(stop - start) == stop - start


def test_bfloat16_products_on_a_cpu_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the rounding of bfloat16 they are the products of the pairs alone."""
    stack = stack_of("qwen3_moe", 3, torch.bfloat16)
    index, weights = routing_of(101, 3, 2)
    hidden = torch.randn(101, HIDDEN, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    counts = list[int]()
    monkeypatch.setattr(pairs, "padded_count", lambda count: counts.append(count) or padded_count(count))
    output = expert_outputs(stack.module, hidden, index, weights.to(torch.bfloat16))
    assert sum(counts) == 202
    expected = _merged(stack, hidden, index, weights.to(torch.bfloat16), None)
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)


def test_experts_outside_the_interface_are_left_alone() -> None:
    assert not is_expert_stack(torch.nn.Linear(2, 2))


def test_experts_of_older_transformers_say_nothing_of_norms() -> None:
    module = stack_of("qwen3_moe", 2).module
    assert is_expert_stack(module)
    module.has_post_expert_norm = True
    assert not is_expert_stack(module)
    del module.has_post_expert_norm
    assert is_expert_stack(module)
