"""The losses of the fake engine: each raises or lowers the logprobs of the targets, in numpy and without torch.

A loss takes the inputs and settings of the real one (`engine.training.losses`) and has its metrics. Its value and
gradient are those of cross-entropy, -sum w p, or of importance sampling, -sum r A, with the real KL and entropy terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tinsmith.engine.base import Datum, Pass
from tinsmith.engine.custom_loss.process import LossProcess, RequestLoss
from tinsmith.engine.training import loss_specs
from tinsmith.errors import BadRequest, Unsupported

MAX_GAP = 20.0
"""Largest difference of logprobs whose ratio is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatumLoss:
    """A datum's loss, its gradients by logprobs (of the targets' shape) and by entropies [N], and its metrics."""

    loss: float
    grad: np.ndarray
    entropy_grad: np.ndarray
    metrics: dict[str, float] = field(default_factory=dict)


def builtin_loss(request: Pass, datum: Datum, p: np.ndarray, entropies: np.ndarray) -> DatumLoss:
    """The request's loss of one datum with its regularizers, in float64."""
    if request.loss_fn not in loss_specs.LOSSES:
        raise Unsupported(f"The fake engine has no loss '{request.loss_fn}'.")
    config = loss_specs.numeric_settings(request)
    inputs = {name: values.astype(np.float64) for name, values in loss_specs.loss_inputs(request, datum).items()}
    flat, metrics, entropy_grad = p.reshape(-1).astype(np.float64), {}, np.zeros(len(datum.tokens))
    weights = inputs.get("weights", np.ones_like(flat))
    if request.loss_fn == "cross_entropy":
        loss, grad = -(weights * flat).sum(), -weights
    else:
        advantages = inputs["advantages"]
        if is_trinity := request.loss_fn == "trinity_ppo":
            advantages = weights * advantages / max(weights.sum(), 1.0) / config["num_total_datums"]
        ratio = np.exp(np.clip(np.where(advantages != 0, flat - inputs["logprobs"], 0.0), -MAX_GAP, MAX_GAP))
        loss, grad = -(ratio * advantages).sum(), -ratio * advantages
        if is_trinity:
            sums = (weights, weights * ratio, weights * ratio**2, 0 * weights, 0 * weights)
            names = ("response_tokens", "ratio_sum", "ratio_squared_sum", "clipped_tokens", "kl_sum")
            metrics = {f"trinity/{name}:sum": float(values.sum()) for name, values in zip(names, sums, strict=True)}
    if "kl_mask" in inputs:
        mask, coefficient = inputs["kl_mask"], config["kl_coef"]
        gap = np.where(mask != 0, flat - inputs["ref_logprobs"], 0.0)
        estimates = {
            "k1": (gap, np.ones_like(gap)),
            "k2": (gap**2 / 2, gap),
            "k3": (np.expm1(-gap) + gap, -np.expm1(-gap)),
        }
        value, derivative = estimates[loss_specs.kl_estimator(request)]
        metrics["kl:sum"] = float((mask * value).sum())
        loss, grad = loss + coefficient * metrics["kl:sum"], grad + coefficient * mask * derivative
    if "entropy_mask" in inputs:
        metrics["entropy:sum"] = float((inputs["entropy_mask"] * entropies).sum())
        loss = loss - config["entropy_coef"] * metrics["entropy:sum"]
        entropy_grad = -config["entropy_coef"] * inputs["entropy_mask"]
    return DatumLoss(loss=float(loss), grad=grad.reshape(p.shape), entropy_grad=entropy_grad, metrics=metrics)


def custom_loss(request: Pass, process: LossProcess) -> Callable[[Datum, np.ndarray, np.ndarray], DatumLoss]:
    """The function that evaluates the request's custom loss on a datum."""
    assert request.graph is not None
    request_loss = RequestLoss(process, request.graph)

    def evaluate(datum: Datum, p: np.ndarray, _entropies: np.ndarray) -> DatumLoss:
        [end] = request_loss.run([(p.astype(np.float32), datum.inputs)])
        if not (np.isfinite(end.loss) and np.isfinite(end.grad).all()):
            raise BadRequest(f"The custom loss of this request is {end.loss}.", "Check its inputs.")
        entropy_grad = np.zeros(len(datum.tokens))
        return DatumLoss(loss=end.loss, grad=end.grad, entropy_grad=entropy_grad, metrics=dict(end.metrics))

    return evaluate
