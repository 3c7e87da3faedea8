"""The head's own backward against autograd through the logits in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tinsmith.engine.lora.lm_head import BLOCK_ROWS, LMHead, PackedTargets, ScoreGrads, log_softmax
from tinsmith.engine.model.logit_rule import LogitRule


def whole(hidden: Tensor, weight: Tensor, targets: PackedTargets) -> tuple[Tensor, Tensor]:
    """Logprobs [M] of the targets and entropies [T] in float64, with gradients."""
    logprobs = torch.log_softmax(hidden @ weight.T, dim=1)
    return logprobs[targets.at, targets.ids], -(logprobs.exp() * logprobs).sum(1)


@pytest.mark.parametrize(
    "sharp", [0.1, 1.0, 30.0]
)  # nearly flat; usual; nearly certain, with probabilities that underflow
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_entropies_and_their_gradients_match_autograd(dtype: torch.dtype, near: float, sharp: float) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, width, words = 2 * BLOCK_ROWS + 7, 32, 900
    weight = torch.randn(words, width, generator=draw).bfloat16().float()
    hidden = (torch.randn(rows, width, generator=draw) * sharp / width**0.5).to(dtype)
    at = torch.randint(0, rows, (3 * rows,), generator=draw).sort().values  # zero or more targets at a position
    targets = PackedTargets(at, torch.randint(0, words, at.shape, generator=draw))
    entropy_grads = torch.randn(rows, generator=draw) * (torch.arange(rows) % 3 > 0)
    grads = torch.randn(len(at), generator=draw) * (at % 2)
    grad_mask = torch.zeros(rows, dtype=torch.bool).index_fill(0, at, True)
    entropy_grads *= grad_mask  # a position without any target is not computed

    leaf = hidden.double().requires_grad_()
    logprobs, entropies = whole(leaf, weight.double(), targets)
    ((logprobs * grads).sum() + (entropies * entropy_grads).sum()).backward()
    head = LMHead(weight.to(dtype))
    scored = head.score(hidden, [], targets, grad_mask, entropies=True)
    assert scored.entropies is not None
    torch.testing.assert_close(scored.logprobs.double(), logprobs.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        scored.entropies[grad_mask].double(), entropies.detach()[grad_mask], rtol=1e-4, atol=1e-5
    )
    actual = head.backward(hidden, scored, targets, ScoreGrads(grads, entropy_grads)).double()
    assert leaf.grad is not None
    assert bool(torch.isfinite(actual).all())
    assert float((actual - leaf.grad).norm() / leaf.grad.norm()) < near


def test_score_without_entropies_saves_nothing() -> None:
    targets = PackedTargets(torch.arange(4), torch.zeros(4, dtype=torch.long))
    scored = LMHead(torch.randn(8, 3)).score(torch.randn(4, 3), [], targets)
    assert scored.entropies is None
    assert scored.saved == []


@pytest.mark.parametrize("sharp", [0.5, 2.0, 4.0])
def test_sums_over_large_vocabulary_are_exact_to_float32(sharp: float) -> None:
    """Few large and many small probabilities: PyTorch's own log-softmax is 8e-6 off in the mean (AVX2, sharp = 4)."""
    logits = torch.randn(16, 49_152, generator=torch.Generator().manual_seed(0)) * sharp
    rows = torch.arange(16)
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
    targets = PackedTargets(torch.arange(5), torch.arange(5))
    head = LMHead(weight, LogitRule(0.5, softcap, bias))
    logits = 0.5 * (hidden @ weight.T + bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    wanted = logits.log_softmax(1)[targets.at, targets.ids]
    wanted.backward(torch.arange(1.0, 6.0))
    scored = head.score(hidden.detach(), [], targets, torch.ones(5, dtype=torch.bool))
    torch.testing.assert_close(scored.logprobs, wanted.detach())
    grad = head.backward(hidden.detach(), scored, targets, ScoreGrads(torch.arange(1.0, 6.0)))
    torch.testing.assert_close(grad, hidden.grad)
