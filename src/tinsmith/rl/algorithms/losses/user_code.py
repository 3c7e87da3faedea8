"""Policy losses that users write: a function of the tokens of one reply, or a PolicyLoss class, on tensors of PyTorch.

The function sees one training row at a time, so a server that runs uploaded losses can compute it too (`row_loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from typing_extensions import override

from tinsmith.plurals import counted
from tinsmith.rl.algorithms.arrays import Array
from tinsmith.rl.algorithms.losses.base import PolicyLoss, SamplerRatio, Tokens
from tinsmith.rl.plugins import CustomPart, Kind

INPUTS = ("logprobs", "sampling_logprobs", "advantages", "reference_logprobs")
"""Parameters that a loss may have besides its own: tensors of the tokens of a reply."""
_SIZES = frozenset(("shape", "size", "numel", "nelement", "ndim", "dim"))
"""Attributes that a server does not compute of the tokens that a mask selects."""
_FIX = "Return a loss for each token, a tensor of the shape of logprobs, or (losses, metrics)."


class CustomLoss(CustomPart, PolicyLoss):
    """User code: a function of the tokens of one reply, or a PolicyLoss class.

    Its parameters are chosen by name among `logprobs` (those of the model in training, with a gradient),
    `sampling_logprobs`, `advantages` and `reference_logprobs`, tensors float64 [T] of the T tokens that the policy
    sampled; others are its arguments. It returns the loss of each token, [T], which algorithm.aggregate adds up, or
    (losses, metrics), where a metric is a number or one for each token.

    Example: def policy_gradient(logprobs, advantages): return -advantages * logprobs
    """

    kind: ClassVar[Kind] = "loss"
    type: Literal["custom"] = "custom"

    @override
    def check_code(self) -> None:
        _ = self._own or self._function

    @cached_property
    def _own(self) -> PolicyLoss | None:
        return self.settings_of(PolicyLoss)

    @cached_property
    def _function(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        """The function and the inputs that it takes. Raises ValueError if the path or the arguments are wrong."""
        function, taken = self.function_of(named=INPUTS)
        if "logprobs" not in taken:
            raise ValueError(f"{self.label} does not take logprobs, so it has no gradient")
        return function, taken

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that the function takes."""
        return self._function[1]

    @property
    def linear(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the loss is known to be linear in the advantage: of a function it is not."""
        return self._own.linear if self._own else False

    @property
    def reads_reference(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the loss reads the reference's logprobs."""
        return self._own.reads_reference if self._own else "reference_logprobs" in self.inputs

    @property
    @override
    def has_gradient_without_advantage(self) -> bool:
        return self._own.has_gradient_without_advantage if self._own else True

    @property
    @override
    def sampler_ratio(self) -> SamplerRatio:
        if self._own:
            return self._own.sampler_ratio
        return "bounded" if "sampling_logprobs" in self.inputs else "none"

    @property
    @override
    def advantage_kink(self) -> float | None:
        return self._own.advantage_kink if self._own else None

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        """Losses [T], and metrics. Raises ConfigError unless the code returns finite losses with a gradient."""
        import torch

        if isinstance(logprobs, np.ndarray):  # of a loss that the server computes: only the metrics are read
            values, metrics = self._tokens(torch.from_numpy(logprobs), batch.as_tensors())
            return values.numpy(), metrics
        values, metrics = self._tokens(logprobs, batch)
        if logprobs.requires_grad:
            if not values.requires_grad:
                raise self.fault("does not depend on logprobs, so it has no gradient", "Compute it of logprobs.")
            logprobs.register_hook(self._check_gradient)
        return values, metrics

    def _tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        import torch

        if self._own:
            with self.errors_named():
                values, metrics = self._own.tokens(logprobs, batch)
            return self._checked(values, logprobs), metrics
        function, taken = self._function
        arrays: dict[str, Any] = dict(
            zip(INPUTS, (logprobs, batch.old, batch.advantages, batch.reference), strict=True)
        )
        lengths = torch.bincount(batch.sequence).tolist()
        pieces = {name: arrays[name].split(lengths) for name in taken}
        ends = np.cumsum(lengths)
        losses, weights, metrics = [], [], dict[str, list[float]]()
        for row in (row for row, length in enumerate(lengths) if length):
            returned = function(**{name: piece[row] for name, piece in pieces.items()})
            values, measured = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
            losses.append(self._checked(values, pieces["logprobs"][row]))
            weights.append(lengths[row] * float(batch.counts[ends[row] - 1]))
            for name, value in self._measured(measured).items():
                metrics.setdefault(name, []).append(value)
        if uneven := [name for name, values in metrics.items() if len(values) < len(weights)]:
            raise self.fault(
                f"returned the metric {uneven[0]} for some replies only", "Return the same metrics always."
            )
        return torch.cat(losses) if losses else logprobs * 0.0, {
            name: torch.tensor(np.average(values, weights=weights)) for name, values in metrics.items()
        }

    def _measured(self, metrics: Any) -> dict[str, float]:
        """The metrics that the code returned for a reply, as numbers."""
        if not isinstance(metrics, Mapping):
            raise self.fault(f"returned metrics that are a {type(metrics).__name__}", _FIX)
        with self.errors_named():
            return {
                str(name): float(value.detach().double().mean()) if _is_tensor(value) else float(value)
                for name, value in metrics.items()
            }

    def _checked(self, values: Any, logprobs: Array) -> Array:
        """The losses that the code returned for tokens with these logprobs."""
        import torch

        if not _is_tensor(values):
            raise self.fault(f"returned a {type(values).__name__} in place of a tensor", _FIX)
        if values.shape != logprobs.shape or not values.is_floating_point():
            shape = f"shape {tuple(values.shape)} and type {values.dtype}".replace("torch.", "")
            raise self.fault(f"returned a tensor of {shape} for {counted(len(logprobs), 'token')}", _FIX)
        if not torch.isfinite(values).all():
            at = int((~torch.isfinite(values)).nonzero()[0, 0])
            value, logprob = (float(array.detach()[at]) for array in (values, logprobs))
            raise self.fault(
                f"returned {value} for a token whose logprob is {logprob:.4g}",
                "Bound what it exponentiates, divides by or takes the logarithm of.",
            )
        return values.double()

    def _check_gradient(self, gradient: Array) -> None:
        import torch

        if not torch.isfinite(gradient).all():
            count = int((~torch.isfinite(gradient)).sum())
            raise self.fault(
                f"has a gradient that is not finite at {count} of {counted(len(gradient), 'token')}",
                "Bound what it exponentiates, divides by or takes the root of, also where its value is not used.",
            )

    def row_loss(self) -> Callable[..., Any]:
        """The loss of one training row of N targets, for a server to compute: a function of tensors [N] to (sum, {}).

        Its parameters are `logprobs`, `mask`, `weights` of the aggregate, and the INPUTS. Raises ValueError, which says
        why, for a loss that a server cannot run.
        """
        import torch.fx

        if self._own:
            raise ValueError("it is a class, which reads whole batches")
        function, taken = self._function

        def total(mask: Any, weights: Any, **arrays: Any) -> Any:
            inside = mask > 0
            returned = function(**{name: arrays[name][inside] for name in taken})
            values = returned[0] if isinstance(returned, tuple) else returned
            return (values * weights[inside]).sum(), {}

        def loss_of_row(logprobs: Any, mask: Any, weights: Any, sampling_logprobs: Any, advantages: Any) -> Any:
            return total(mask, weights, logprobs=logprobs, sampling_logprobs=sampling_logprobs, advantages=advantages)

        def loss_with_reference(
            logprobs: Any, mask: Any, weights: Any, sampling_logprobs: Any, advantages: Any, reference_logprobs: Any
        ) -> Any:
            return total(
                mask,
                weights,
                logprobs=logprobs,
                sampling_logprobs=sampling_logprobs,
                advantages=advantages,
                reference_logprobs=reference_logprobs,
            )

        row = loss_with_reference if "reference_logprobs" in taken else loss_of_row
        try:
            graph = torch.fx.symbolic_trace(row)
        except Exception as error:
            raise ValueError("torch.fx cannot trace it: it branches on values, or calls other libraries") from error
        if any({str(node.target), *map(str, node.args)} & _SIZES for node in graph.graph.nodes):
            raise ValueError("it reads how many tokens a reply has; a mean or a sum does not")
        return row


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)
