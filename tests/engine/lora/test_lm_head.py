"""The head's own backward against autograd through the logits in float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair, PlacedAdapter
from tinsmith.engine.lora.head.blocks import CPU_ROWS, GPU_BYTES, MIN_GPU_ROWS, PackedTargets, block_rows
from tinsmith.engine.lora.head.products import Float32Products
from tinsmith.engine.lora.head.softmax import log_softmax
from tinsmith.engine.lora.lm_head import LMHead, ScoreGrads
from tinsmith.engine.model import precision
from tinsmith.engine.model.logit_rule import LogitRule
from tinsmith.engine.model_parts import HEAD


def scores_of(logits: Tensor, targets: PackedTargets) -> tuple[Tensor, Tensor]:
    """Logprobs [M] of the targets and entropies [T] in float64, with gradients."""
    logprobs = torch.log_softmax(logits, dim=1)
    return logprobs[targets.at, targets.ids], -(logprobs.exp() * logprobs).sum(1)


@pytest.mark.parametrize(
    "sharp", [0.1, 1.0, 30.0]
)  # nearly flat; usual; nearly certain, with probabilities that underflow
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_entropies_and_their_gradients_match_autograd(dtype: torch.dtype, near: float, sharp: float) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, width, words = 2 * CPU_ROWS + 7, 32, 900
    weight = torch.randn(words, width, generator=draw).bfloat16().float()
    hidden = (torch.randn(rows, width, generator=draw) * sharp / width**0.5).to(dtype)
    at = torch.randint(0, rows, (3 * rows,), generator=draw)  # zero or more targets at a position
    targets = PackedTargets(at.numpy(), torch.randint(0, words, at.shape, generator=draw).numpy())
    entropy_grads = torch.randn(rows, generator=draw) * (torch.arange(rows) % 3 > 0)
    grads = torch.randn(len(at), generator=draw) * (at % 2)
    grad_mask = torch.zeros(rows, dtype=torch.bool).index_fill(0, at, True)
    entropy_grads *= grad_mask  # a position without any target is not computed

    leaf = hidden.double().requires_grad_()
    logprobs, entropies = scores_of(leaf @ weight.double().T, targets)
    ((logprobs * grads).sum() + (entropies * entropy_grads).sum()).backward()
    head = LMHead(weight.to(dtype))
    scored = head.score(hidden, [], targets, grad_mask.numpy(), entropies=True)
    assert scored.entropies is not None
    torch.testing.assert_close(scored.logprobs.double(), logprobs.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        scored.entropies[grad_mask].double(), entropies.detach()[grad_mask], rtol=1e-4, atol=1e-5
    )
    actual = head.backward(hidden, scored, ScoreGrads(grads, entropy_grads)).double()
    assert leaf.grad is not None
    assert bool(torch.isfinite(actual).all())
    assert float((actual - leaf.grad).norm() / leaf.grad.norm()) < near


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_with_a_float32_copy_are_exact(dtype: torch.dtype) -> None:
    precision.set_matmul_precision(torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(shape, generator=draw).to(dtype) for shape in ((900, 64), (128, 64)))
    logits = Float32Products(weight, None)(hidden)
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


def test_score_without_entropies_saves_nothing() -> None:
    targets = PackedTargets(np.arange(4), np.zeros(4, np.int64))
    scored = LMHead(torch.randn(8, 3)).score(torch.randn(4, 3), [], targets)
    assert scored.entropies is None
    assert scored.saved == []


@pytest.mark.parametrize("sharp", [0.5, 2.0, 4.0])
def test_sums_over_large_vocabulary_are_exact_to_float32(sharp: float) -> None:
    """Few large and many small probabilities: PyTorch's own log-softmax is 8e-6 off in the mean (AVX2, sharp = 4)."""
    logits = torch.randn(16, 49_152, generator=torch.Generator().manual_seed(0)) * sharp
    rows = np.arange(16)
    wanted = torch.log_softmax(logits.double(), 1)
    scored = LMHead(logits.T.contiguous()).score(torch.eye(16), [], PackedTargets(rows, rows), entropies=True)
    assert scored.entropies is not None
    for actual, exact in (
        (scored.logprobs, wanted[rows, rows]),
        (scored.entropies, -(wanted.exp() * wanted).sum(1)),
        (log_softmax(logits), wanted),
    ):
        assert float((actual - exact).abs().mean()) < 1e-6


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logit_rule_reaches_scores_and_gradients(softcap: float | None) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(32, 8, generator=draw), torch.randn(32, generator=draw)
    hidden = torch.randn(5, 8, generator=draw).requires_grad_()
    targets = PackedTargets(np.arange(5), np.arange(5))
    head = LMHead(weight, LogitRule(0.5, softcap, bias))
    logits = 0.5 * (hidden @ weight.T + bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    wanted = logits.log_softmax(1)[targets.at, targets.ids]
    wanted.backward(torch.arange(1.0, 6.0))
    scored = head.score(hidden.detach(), [], targets, np.ones(5, bool))
    torch.testing.assert_close(scored.logprobs, wanted.detach())
    grad = head.backward(hidden.detach(), scored, ScoreGrads(torch.arange(1.0, 6.0)))
    torch.testing.assert_close(grad, hidden.grad)


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 45), st.sampled_from([1, 3]), st.integers(0, 2**32 - 1))
def test_blocks_of_every_size_match_autograd(length: int, rows: int, per_position: int, seed: int) -> None:
    """Tenants, targets without order or gradient, and rules of logits."""
    draw, numbers = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    width, words = 6, 50
    weight, bias = torch.randn(words, width, generator=draw), torch.randn(words, generator=draw)
    rule = LogitRule(float(numbers.choice([1.0, 0.5])), 4.0 if numbers.random() < 0.5 else None, bias)
    hidden = torch.randn(length, width, generator=draw, requires_grad=True)
    adapters = tenants(length, width, words, numbers, draw)
    at = numbers.permutation(np.repeat(numbers.permutation(length)[: max(1, length // 2)], per_position))
    targets = PackedTargets(at, numbers.integers(0, words, len(at)))
    grad_mask = numbers.random(length) < 0.6
    grads = torch.as_tensor((numbers.normal(size=len(at)) * grad_mask[at]).astype(np.float32))
    is_scored = torch.as_tensor(np.isin(np.arange(length), at))
    entropy_grads = torch.as_tensor(numbers.normal(size=length).astype(np.float32) * grad_mask) * is_scored

    logits = (hidden @ weight.T + bias).double()
    for weights, start, stop in adapters:
        for pair in weights.pairs.values():
            logits[start:stop] += weights.scale * (hidden[start:stop] @ pair.a.T @ pair.b.T).double()
    logits = logits * rule.scale
    logits = logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)
    logprobs, entropies = scores_of(logits, targets)
    ((logprobs * grads).sum() + (entropies * entropy_grads).sum()).backward()

    head = LMHead(weight, rule, rows)
    scored = head.score(hidden.detach(), adapters, targets, grad_mask, entropies=True)
    actual = head.backward(hidden.detach(), scored, ScoreGrads(grads, entropy_grads))
    torch.testing.assert_close(scored.logprobs.double(), logprobs.detach(), rtol=1e-5, atol=1e-5)
    assert scored.entropies is not None
    torch.testing.assert_close(
        scored.entropies[is_scored].double(), entropies.detach()[is_scored], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(actual, hidden.grad, rtol=1e-4, atol=1e-4)
    for weights, _, _ in adapters:
        for name, pair in weights.pairs.items():
            buffer = weights.gradients[name]
            for leaf, sum_of_grads in ((pair.a, buffer.a), (pair.b, buffer.b)):
                torch.testing.assert_close(sum_of_grads, leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "width", "rank"), [(96, 64, 16), (70, 32, 8), (51, 64, 8), (64, 40, 16), (64, 32, 3)]
)
def test_adapters_of_a_bfloat16_head_match_autograd(words: int, width: int, rank: int) -> None:
    """Adapters in float32, on two of three spans."""
    draw, length = torch.Generator().manual_seed(0), 45
    weight = torch.randn(words, width, generator=draw).bfloat16()
    hidden, adapters = torch.randn(length, width, generator=draw).bfloat16(), list[PlacedAdapter]()
    leaf = hidden.double().requires_grad_()
    logits = leaf @ weight.double().T
    leaves = list[tuple[Tensor, Tensor]]()
    for start, stop in ((0, 19), (30, 45)):
        pair = LoraPair(torch.randn(rank, width, generator=draw) / 8, torch.randn(words, rank, generator=draw) / 8)
        own = pair.a.double().requires_grad_(), pair.b.double().requires_grad_()
        span = torch.zeros(length, 1, dtype=torch.float64)
        span[start:stop] = 0.7
        logits = logits + span * (leaf @ own[0].T @ own[1].T)
        buffers = LoraPair(torch.zeros(rank, width), torch.zeros(words, rank))
        adapters.append((AdapterWeights(0.7, {HEAD: pair}, {HEAD: buffers}), start, stop))
        leaves += [(own[0], buffers.a), (own[1], buffers.b)]
    targets = PackedTargets(np.arange(length), np.arange(length) % words)
    logprobs, _ = scores_of(logits, targets)
    grads = torch.randn(length, generator=draw)
    (logprobs * grads).sum().backward()

    head = LMHead(weight)
    scored = head.score(hidden, adapters, targets, np.ones(length, bool))
    torch.testing.assert_close(scored.logprobs.double(), logprobs.detach(), rtol=1e-5, atol=1e-4)
    hidden_grad = head.backward(hidden, scored, ScoreGrads(grads)).double()
    for wanted, actual in ((leaf, hidden_grad), *leaves):
        assert wanted.grad is not None
        assert float((actual.double() - wanted.grad).norm() / wanted.grad.norm()) < 1e-2


def tenants(
    length: int, width: int, words: int, numbers: np.random.Generator, draw: torch.Generator
) -> list[PlacedAdapter]:
    """Adapters of neighbouring spans; some have none of the head, and some positions have no adapter."""
    edges = np.sort(numbers.integers(0, length + 1, 6)).tolist()
    placed = []
    for start, stop in pairwise(edges):
        pair = LoraPair(torch.randn(2, width, generator=draw), torch.randn(words, 2, generator=draw))
        for leaf in (pair.a, pair.b):
            leaf.requires_grad_()
            leaf.grad = torch.zeros_like(leaf)
        pairs = {HEAD: pair} if numbers.random() < 0.7 else {}
        gradients = {name: LoraPair(torch.zeros(2, width), torch.zeros(words, 2)) for name in pairs}
        placed.append((AdapterWeights(0.7, pairs, gradients), start, stop))
    return placed


@pytest.mark.parametrize("vocabulary", [49_152, 151_936, 262_144])
def test_gpus_read_weights_for_many_rows_at_once(vocabulary: int) -> None:
    rows = block_rows(vocabulary, torch.device("cuda"))
    assert rows >= MIN_GPU_ROWS
    assert rows == MIN_GPU_ROWS or rows * vocabulary * 4 <= GPU_BYTES
    assert block_rows(vocabulary, torch.device("cpu")) == CPU_ROWS
