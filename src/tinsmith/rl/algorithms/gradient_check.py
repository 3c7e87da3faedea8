"""Gradients of a policy loss by finite differences, on random tokens, in float64.

Values that the loss takes as constants (`detach`, `torch.no_grad`) are those of the point where the gradient is taken:
each is recorded there and returned again when a token is shifted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinsmith.rl.algorithms.losses.base import Aggregate, PolicyLoss, Tokens, aggregate_weights

_LENGTHS = (1, 2, 5, 8)
"""Tokens of the replies."""
_SHIFT = 1e-6
TOLERANCE = 1e-4
"""Largest difference, relative to the largest gradient, at which gradients are equal."""


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """A gradient beside that of finite differences, at the token where they differ most.

    Example: GradientCheck(tokens=16, gradient=-0.5, differences=-0.5, error=1e-10)
    """

    tokens: int
    """Number of tokens that were compared."""
    gradient: float
    differences: float
    error: float
    """Difference of the two, relative to the largest gradient."""

    @property
    def equal(self) -> bool:
        """Whether the gradients are equal."""
        return self.error <= TOLERANCE


def random_tokens(aggregate: Aggregate = "token_mean", *, pairs: bool = False) -> tuple[Any, Tokens]:
    """Logprobs of the model in training [T], and tokens of replies with advantages of both signs, in tensors.

    With `pairs`, the first half of the replies are chosen, the second rejected ones, and all count as mismatched.
    """
    import torch

    random = np.random.default_rng(0)
    sequence = np.repeat(np.arange(len(_LENGTHS)), _LENGTHS)
    count = len(sequence)
    logprobs = -random.uniform(0.2, 3.0, count)
    everywhere = np.ones(count, bool)
    weights = aggregate_weights(aggregate, sequence, np.ones(count), everywhere)
    tokens = Tokens(
        old=np.minimum(logprobs + random.normal(0.0, 0.4, count), -0.01),
        advantages=random.normal(0.0, 1.0, len(_LENGTHS))[sequence] + random.normal(0.0, 0.1, count),
        sequence=sequence,
        counts=np.ones(count),
        expert=~everywhere,
        weights=weights,
        policy_weights=weights,
        expert_weights=np.zeros(count),
        reference=np.minimum(logprobs + random.normal(0.0, 0.4, count), -0.01),
        pairs=np.arange(len(_LENGTHS)).reshape(2, -1).T if pairs else None,
        mismatched=np.arange(len(_LENGTHS)) if pairs else None,
    )
    return torch.from_numpy(logprobs), tokens.as_tensors()


def check_gradient(loss: PolicyLoss, aggregate: Aggregate = "token_mean", *, pairs: bool = False) -> GradientCheck:
    """Compare the gradient of a loss with finite differences. Raises ConfigError for a loss of a user that fails."""
    import torch

    point, tokens = random_tokens(aggregate, pairs=pairs)
    leaf = point.clone().requires_grad_(True)
    constants: list[Any] = []
    with _constants(constants.append, None):
        total, _ = loss.total(leaf, _with_likeliest(tokens, loss, leaf))
    total.backward()
    gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(point)

    def shifted(at: int, by: float) -> float:
        moved = point.clone()
        moved[at] += by
        recorded = iter(constants)
        with _constants(None, lambda: next(recorded)):
            total, _ = loss.total(moved.requires_grad_(True), _with_likeliest(tokens, loss, moved))
        return float(total.detach())

    differences = torch.tensor(
        [(shifted(at, _SHIFT) - shifted(at, -_SHIFT)) / (2 * _SHIFT) for at in range(len(point))]
    )
    errors = (gradient - differences).abs() / gradient.abs().max().clamp(min=1e-12)
    worst = int(errors.argmax())
    return GradientCheck(len(point), float(gradient[worst]), float(differences[worst]), float(errors[worst]))


def _with_likeliest(tokens: Tokens, loss: PolicyLoss, logprobs: Any) -> Tokens:
    """The tokens, each of which is the likeliest of the teacher if the loss reads it."""
    if not loss.reads_teacher_top:
        return tokens
    return replace(tokens, teacher_top=tokens.old[:, None], student_top=logprobs[:, None])


def try_loss(loss: PolicyLoss) -> None:
    """Compute a loss and its gradient on random tokens. Raises ConfigError for a loss of a user that fails."""
    point, tokens = random_tokens()
    loss.total(point.requires_grad_(True), tokens)[0].backward()


def _constants(record: Callable[[Any], None] | None, recorded: Callable[[], Any] | None) -> Any:
    """A context that records the tensors which code takes as constants, or returns those that were recorded."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Constants(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            value = func(*args, **(kwargs or {}))
            constant = func in (torch.Tensor.detach, torch.detach) or not torch.is_grad_enabled()
            if not (constant and isinstance(value, torch.Tensor) and value.is_floating_point()):
                return value
            if record is not None:
                record(value.clone())
                return value
            return recorded() if recorded is not None else value

    return Constants()
