"""The fake engine's losses and regularizers, each with its gradient, in numpy.

They repeat `engine.training.losses`, because the API process, which holds a fake engine, must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tinsmith.engine.base import Datum, Pass
from tinsmith.engine.custom_loss.process import LossProcess, RequestLoss
from tinsmith.engine.training import loss_specs
from tinsmith.errors import BadRequest, Unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class DatumLoss:
    """A datum's loss, its gradients by logprobs (of the targets' shape) and by entropies [N], and its metrics."""

    loss: float
    grad: np.ndarray
    entropy_grad: np.ndarray
    metrics: dict[str, float]


def builtin_loss(request: Pass, datum: Datum, p: np.ndarray, entropies: np.ndarray) -> DatumLoss:
    """The request's loss of one datum with its regularizers, in float64."""
    if request.loss_fn not in loss_specs.LOSSES:
        raise Unsupported(f"The fake engine has no loss '{request.loss_fn}'.")
    config = loss_specs.numeric_settings(request)
    inputs = {name: values.astype(np.float64) for name, values in loss_specs.loss_inputs(request, datum).items()}
    flat, metrics = p.reshape(-1).astype(np.float64), {}
    if request.loss_fn == "trinity_ppo":
        loss, grad, metrics = _trinity(flat, inputs, config)
    else:
        loss, grad = _loss(request.loss_fn, flat, inputs, config)
        if "kl_mask" in inputs:
            value, value_grad = _divergence(loss_specs.kl_estimator(request), flat, inputs)
            loss, grad = loss + config["kl_coef"] * value, grad + config["kl_coef"] * value_grad
            metrics = {"kl:sum": value}
    entropy_grad = np.zeros(len(datum.tokens))
    if "entropy_mask" in inputs:
        metrics["entropy:sum"] = float((inputs["entropy_mask"] * entropies).sum())
        loss, entropy_grad = (
            loss - config["entropy_coef"] * metrics["entropy:sum"],
            -config["entropy_coef"] * inputs["entropy_mask"],
        )
    return DatumLoss(loss=loss, grad=grad.reshape(p.shape), entropy_grad=entropy_grad, metrics=metrics)


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


def _loss(
    name: str, p: np.ndarray, inputs: dict[str, np.ndarray], config: dict[str, float]
) -> tuple[float, np.ndarray]:
    """(loss, gradient by p)."""
    if name == "cross_entropy":
        return float(-(inputs["weights"] * p).sum()), -inputs["weights"]
    q, adv = inputs["logprobs"], inputs["advantages"]
    if name == "dro":
        gap = np.where((adv != 0) | (q != 0), p - q, 0.0)
        return float(-(p * adv - 0.5 * config["beta"] * gap**2).sum()), -(adv - config["beta"] * gap)
    gap = np.where(adv != 0, p - q, 0.0)  # a masked position's q is 0: exp must not overflow there
    if name == "gspo":
        mask = inputs["sequence_ratio_mask"] != 0
        gap = np.full(p.shape, (p - q)[mask].mean() if mask.any() else 0.0)
    r = np.exp(gap)
    if name == "importance_sampling":
        return float(-(r * adv).sum()), -r * adv
    clipped = np.clip(r, inputs["clip_low_threshold"], inputs["clip_high_threshold"])
    if name == "cispo":
        return float(-(clipped * p * adv).sum()), -clipped * adv
    unclipped = r * adv <= clipped * adv
    if dual := config.get("dual_clip"):
        surrogate = np.minimum(r * adv, clipped * adv)
        dual_clipped = (adv < 0) & (surrogate < dual * adv)
        return float(-np.where(dual_clipped, dual * adv, surrogate).sum()), np.where(
            unclipped & ~dual_clipped, -r * adv, 0.0
        )
    return float(-np.minimum(r * adv, clipped * adv).sum()), np.where(unclipped, -r * adv, 0.0)


def _trinity(
    p: np.ndarray, inputs: dict[str, np.ndarray], config: dict[str, float]
) -> tuple[float, np.ndarray, dict[str, float]]:
    mask, adv = inputs["weights"], inputs["advantages"]
    gap = np.where(mask != 0, p - inputs["logprobs"], 0.0)
    r = np.exp(np.clip(gap, -20, 20))
    clipped = np.clip(r, 1 - config["clip_range"], 1 + config["clip_range"])
    unclipped = (-adv * r >= -adv * clipped) & ~((adv < 0) & (-adv * r > -adv * config["clip_ratio_c"]))
    token = np.maximum(-adv * r, -adv * clipped)
    token = np.where(adv < 0, np.minimum(-adv * config["clip_ratio_c"], token), token)
    ref_gap = (p - inputs["ref_logprobs"]) if config["kl_coef"] else np.zeros_like(p)
    scale = mask / max(mask.sum(), 1.0) / config["num_total_datums"]
    grad = scale * (np.where(unclipped & (np.abs(gap) <= 20), -adv * r, 0.0) + config["kl_coef"] * ref_gap)
    sums = {
        "response_tokens": mask,
        "ratio_sum": mask * r,
        "ratio_squared_sum": mask * r**2,
        "clipped_tokens": mask * (-adv * clipped > -adv * r),
        "kl_sum": mask * ref_gap**2 / 2,
    }
    loss = float((scale * (token + config["kl_coef"] * ref_gap**2 / 2)).sum())
    return loss, grad, {f"trinity/{name}:sum": float(values.sum()) for name, values in sums.items()}


def _divergence(estimator: str, p: np.ndarray, inputs: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """The masked sum of a KL estimator, and its gradient by p."""
    mask = inputs["kl_mask"]
    gap = np.where(mask != 0, p - inputs["ref_logprobs"], 0.0)
    value, grad = {
        "k1": (gap, np.ones_like(gap)),
        "k2": (gap**2 / 2, gap),
        "k3": (np.expm1(-gap) + gap, -np.expm1(-gap)),
    }[estimator]
    return float((mask * value).sum()), mask * grad
