"""The fake engine's losses and their terms, each with its slope. Numpy; an uploaded loss is torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tinsmith.engine.base import Datum, Pass
from tinsmith.engine.training import loss_specs
from tinsmith.errors import BadRequest, Unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A datum's loss, its slopes in the logprobs (targets' shape) and in the entropies [N], and its metrics."""

    loss: float
    slope: np.ndarray
    steep: np.ndarray
    metrics: dict[str, float]


def scored(request: Pass, datum: Datum, p: np.ndarray, entropies: np.ndarray) -> Scored:
    """The request's loss of one datum, with the terms that it asks for; float64."""
    if request.loss_fn not in loss_specs.LOSSES:
        raise Unsupported(f"The fake engine has no loss '{request.loss_fn}'.")
    config = loss_specs.numbers(request)
    inputs = {name: values.astype(np.float64) for name, values in loss_specs.filled(request, datum).items()}
    flat, metrics = p.reshape(-1).astype(np.float64), {}
    if request.loss_fn == "trinity_ppo":
        loss, slope, metrics = _trinity(flat, inputs, config)
    else:
        loss, slope = _loss(request.loss_fn, flat, inputs, config)
        if "kl_mask" in inputs:
            value, more = _divergence(loss_specs.estimator(request), flat, inputs)
            loss, slope = loss + config["kl_coef"] * value, slope + config["kl_coef"] * more
            metrics = {"kl:sum": value}
    steep = np.zeros(len(datum.tokens))
    if "entropy_mask" in inputs:
        metrics["entropy:sum"] = float((inputs["entropy_mask"] * entropies).sum())
        loss, steep = (
            loss - config["entropy_coef"] * metrics["entropy:sum"],
            -config["entropy_coef"] * inputs["entropy_mask"],
        )
    return Scored(loss=loss, slope=slope.reshape(p.shape), steep=steep, metrics=metrics)


def uploaded(request: Pass) -> Callable[[Datum, np.ndarray, np.ndarray], Scored]:
    """An uploaded loss is torch's business, here as well."""
    import torch

    from tinsmith.engine.custom_loss.runner import Program

    assert request.graph is not None
    program = Program(request.graph)

    def evaluate(datum: Datum, p: np.ndarray, _entropies: np.ndarray) -> Scored:
        loss, slope, metrics = program.run(torch.from_numpy(p), datum.inputs)
        if not (np.isfinite(loss) and bool(torch.isfinite(slope).all())):
            raise BadRequest(f"The custom loss of this request is {loss}.", "Check its inputs.")
        return Scored(loss=loss, slope=slope.numpy(), steep=np.zeros(len(datum.tokens)), metrics=metrics)

    return evaluate


def _loss(
    name: str, p: np.ndarray, inputs: dict[str, np.ndarray], config: dict[str, float]
) -> tuple[float, np.ndarray]:
    """(loss, d loss / d p)."""
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
    free = r * adv <= clipped * adv
    if dual := config.get("dual_clip"):
        gain = np.minimum(r * adv, clipped * adv)
        floored = (adv < 0) & (gain < dual * adv)
        return float(-np.where(floored, dual * adv, gain).sum()), np.where(free & ~floored, -r * adv, 0.0)
    return float(-np.minimum(r * adv, clipped * adv).sum()), np.where(free, -r * adv, 0.0)


def _trinity(
    p: np.ndarray, inputs: dict[str, np.ndarray], config: dict[str, float]
) -> tuple[float, np.ndarray, dict[str, float]]:
    mask, adv = inputs["weights"], inputs["advantages"]
    gap = np.where(mask != 0, p - inputs["logprobs"], 0.0)
    r = np.exp(np.clip(gap, -20, 20))
    clipped = np.clip(r, 1 - config["clip_range"], 1 + config["clip_range"])
    free = (-adv * r >= -adv * clipped) & ~((adv < 0) & (-adv * r > -adv * config["clip_ratio_c"]))
    token = np.maximum(-adv * r, -adv * clipped)
    token = np.where(adv < 0, np.minimum(-adv * config["clip_ratio_c"], token), token)
    far = (p - inputs["ref_logprobs"]) if config["kl_coef"] else np.zeros_like(p)
    scale = mask / max(mask.sum(), 1.0) / config["num_total_datums"]
    slope = scale * (np.where(free & (np.abs(gap) <= 20), -adv * r, 0.0) + config["kl_coef"] * far)
    sums = {
        "response_tokens": mask,
        "ratio_sum": mask * r,
        "ratio_squared_sum": mask * r**2,
        "clipped_tokens": mask * (-adv * clipped > -adv * r),
        "kl_sum": mask * far**2 / 2,
    }
    loss = float((scale * (token + config["kl_coef"] * far**2 / 2)).sum())
    return loss, slope, {f"trinity/{name}:sum": float(values.sum()) for name, values in sums.items()}


def _divergence(estimator: str, p: np.ndarray, inputs: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """sum m k and its slope."""
    mask = inputs["kl_mask"]
    gap = np.where(mask != 0, p - inputs["ref_logprobs"], 0.0)
    value, slope = {
        "k1": (gap, np.ones_like(gap)),
        "k2": (gap**2 / 2, gap),
        "k3": (np.expm1(-gap) + gap, -np.expm1(-gap)),
    }[estimator]
    return float((mask * value).sum()), mask * slope
