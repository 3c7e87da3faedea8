"""The losses: pure functions of tensors, one for each name.

With p the trained model's logprob of a target (at temperature 1), q the sampler's, A the advantage, w the weight and
r = exp(p - q), each returns the SUM over its tokens, in float64, differentiable in p. Nothing is divided by tokens,
datums or batches, except in `trinity_ppo`, whose settings name the divisor. `objective` adds the terms of a request.

`logprobs` is flat [M] over all targets of a request ((N, K) targets row-major), and so is every input; `sequence` [M]
is the number of the datum of each. Inputs, settings and defaults are in `loss_specs`.

Sources: the losses page of the Tinker documentation; GSPO from arXiv 2507.18071, in the form with token-level
gradients; `trinity_ppo` as Trinity-RFT's client requests it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
Loss = Callable[[Tensor, Inputs, Tensor, Config], Tensor]


def cross_entropy(logprobs: Tensor, inputs: Inputs, sequence: Tensor, config: Config) -> Tensor:
    """-sum w p. Weights are any real numbers; the default is 1."""
    weights = inputs.get("weights")
    return -(logprobs if weights is None else weights * logprobs).sum()


def importance_sampling(logprobs: Tensor, inputs: Inputs, sequence: Tensor, config: Config) -> Tensor:
    """-sum r A."""
    return -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()


def ppo(logprobs: Tensor, inputs: Inputs, sequence: Tensor, config: Config) -> Tensor:
    """-sum min(r A, clip(r, low, high) A); with dual_clip c, at least c A where A < 0 (arXiv 1912.09729)."""
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    if not config["dual_clip"]:
        return _clipped(ratio, inputs, config)
    gain = torch.minimum(ratio * advantages, _clip(ratio, inputs, config) * advantages)
    floor = config["dual_clip"] * advantages
    return -torch.where((advantages < 0) & (gain < floor), floor, gain).sum()


def cispo(logprobs: Tensor, inputs: Inputs, sequence: Tensor, config: Config) -> Tensor:
    """-sum sg(clip(r, low, high)) p A: clipping weights a token but never removes its gradient."""
    clipped = _clip(_ratio(logprobs, inputs).detach(), inputs, config)
    return -(clipped * logprobs * inputs["advantages"]).sum()


def dro(logprobs: Tensor, inputs: Inputs, sequence: Tensor, config: Config) -> Tensor:
    """-sum (p A - beta/2 (p - q)^2).

    The RL losses have no mask: clients mark tokens that were not sampled with A = 0 and q = 0. Such positions are left
    out here, because the square would train on the prompt; the documentation does not specify this.
    """
    advantages, sampled = inputs["advantages"], inputs["logprobs"]
    gap = torch.where((advantages != 0) | (sampled != 0), logprobs - sampled, torch.zeros_like(logprobs))
    return -(logprobs * advantages - 0.5 * config["beta"] * gap.square()).sum()


def gspo(logprobs: Tensor, inputs: Inputs, sequence: Tensor, config: Config) -> Tensor:
    """ppo's form with the sequence's ratio: r_t = exp(s + p_t - sg(p_t)), s the mean of sg(p) - q over the mask."""
    mask = (inputs["sequence_ratio_mask"] != 0).to(logprobs.dtype)
    gap = torch.where(mask != 0, logprobs.detach() - inputs["logprobs"], 0.0)
    count = int(sequence[-1]) + 1
    sums = torch.zeros(count, dtype=logprobs.dtype, device=logprobs.device).index_add(0, sequence, gap)
    lengths = torch.zeros_like(sums).index_add(0, sequence, mask).clamp(min=1.0)
    ratio = torch.exp((sums / lengths)[sequence] + logprobs - logprobs.detach())
    return _clipped(ratio, inputs, config)


def trinity_ppo(logprobs: Tensor, inputs: Inputs, sequence: Tensor, config: Config) -> Tensor:
    """1/D sum over datums of the mean over the mask of l + kl_coef (p - ref)^2 / 2, D = num_total_datums.

    l = max(-A r, -A clip(r, 1 - e, 1 + e)), and where A < 0 at most -A c: the dual clip. log r is kept within 20.
    """
    mask, advantages = inputs["weights"], inputs["advantages"]
    ratio, clipped = _trinity_ratios(logprobs, inputs, config)
    token = torch.maximum(-advantages * ratio, -advantages * clipped)
    token = torch.where(advantages < 0, torch.minimum(-advantages * config["clip_ratio_c"], token), token)
    token = token + config["kl_coef"] * _trinity_divergence(logprobs, inputs)
    count = int(sequence[-1]) + 1
    lengths = torch.zeros(count, dtype=logprobs.dtype, device=logprobs.device).index_add(0, sequence, mask)
    return (mask * token / lengths.clamp(min=1.0)[sequence]).sum() / config["num_total_datums"]


def trinity_metrics(logprobs: Tensor, inputs: Inputs, config: Config) -> dict[str, Tensor]:
    """Sums over the mask: tokens, ratios, squared ratios, clipped tokens, (p - ref)^2 / 2."""
    mask, advantages = inputs["weights"], inputs["advantages"]
    ratio, clipped = _trinity_ratios(logprobs, inputs, config)
    divergence = _trinity_divergence(logprobs, inputs) if config["kl_coef"] else torch.zeros_like(mask)
    return {
        "trinity/response_tokens:sum": mask.sum(),
        "trinity/ratio_sum:sum": (mask * ratio).sum(),
        "trinity/ratio_squared_sum:sum": (mask * ratio.square()).sum(),
        "trinity/clipped_tokens:sum": (mask * (-advantages * clipped > -advantages * ratio)).sum(),
        "trinity/kl_sum:sum": (mask * divergence).sum(),
    }


LOSS_FUNCTIONS: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "trinity_ppo": trinity_ppo,
}


def divergence(logprobs: Tensor, inputs: Inputs, estimator: str) -> Tensor:
    """sum m k: an estimate of KL(policy || reference) at the sampled tokens, with d = p - ref.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
    """
    mask = inputs["kl_mask"]
    gap = torch.where(mask != 0, logprobs - inputs["ref_logprobs"], torch.zeros_like(logprobs))
    if estimator == "k1":
        return (mask * gap).sum()
    return (mask * (0.5 * gap.square() if estimator == "k2" else torch.expm1(-gap) + gap)).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a request's loss: flat over its targets, entropies flat over its positions."""

    logprobs: Tensor
    entropies: Tensor | None
    sequence: Tensor
    inputs: Inputs


def objective(
    loss_fn: str, targets: LossInputs, config: Config, estimator: str, settings: Container[str]
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss - entropy_coef sum m H + kl_coef sum m k, and the metrics of these terms.

    `config` has every numeric setting; `settings` names those of the request, which decide the terms.
    """
    logprobs, inputs = targets.logprobs, targets.inputs
    loss = LOSS_FUNCTIONS[loss_fn](logprobs, inputs, targets.sequence, config)
    if loss_fn == "trinity_ppo":
        return _with_entropy(loss, trinity_metrics(logprobs, inputs, config), targets, config)
    metrics: dict[str, Tensor] = {}
    if "kl_coef" in settings:
        metrics["kl:sum"] = divergence(logprobs, inputs, estimator)
        loss = loss + config["kl_coef"] * metrics["kl:sum"]
    return _with_entropy(loss, metrics, targets, config)


def _with_entropy(
    loss: Tensor, metrics: dict[str, Tensor], targets: LossInputs, config: Config
) -> tuple[Tensor, dict[str, Tensor]]:
    if targets.entropies is None or "entropy_mask" not in targets.inputs:
        return loss, metrics
    entropy = (targets.inputs["entropy_mask"] * targets.entropies).sum()
    return loss - config["entropy_coef"] * entropy, {**metrics, "entropy:sum": entropy}


def _trinity_ratios(logprobs: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Tensor]:
    """The ratio, which is 1 outside the mask, and the clipped ratio."""
    gap = torch.where(inputs["weights"] != 0, logprobs - inputs["logprobs"], torch.zeros_like(logprobs))
    ratio = torch.exp(gap.clamp(-20.0, 20.0))
    return ratio, ratio.clamp(1 - config["clip_range"], 1 + config["clip_range"])


def _trinity_divergence(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return 0.5 * (logprobs - inputs["ref_logprobs"]).square()


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """exp(p - q), and 1 where the advantage is 0: masked positions have q = 0, and exp(p) could overflow."""
    gap = logprobs - inputs["logprobs"]
    return torch.exp(torch.where(inputs["advantages"] != 0, gap, torch.zeros_like(gap)))


def _clip(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Clamp to the bounds, which the inputs may give per token."""
    low = inputs.get("clip_low_threshold", torch.full_like(ratio, config["clip_low_threshold"]))
    high = inputs.get("clip_high_threshold", torch.full_like(ratio, config["clip_high_threshold"]))
    return torch.minimum(torch.maximum(ratio, low), high)


def _clipped(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs, config) * advantages).sum()
