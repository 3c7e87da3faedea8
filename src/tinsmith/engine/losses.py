"""The losses: pure functions of tensors, one for each name.

With p the learner's logprob of a target (untempered), q the sampler's, A the advantage, w the weight, r = exp(p - q):
each returns the SUM over its tokens, in float64, differentiable in p. Nothing is divided by tokens, datums or batches.

`logprobs` is flat [M] over all targets of a request (for (N, K) targets row-major), every input likewise;
`sequence` [M] numbers the datum that each belongs to. Inputs, settings and defaults stand in `engine.checks.LOSSES`.

Source: the Tinker documentation's losses page; GSPO from arXiv 2507.18071 in the form with token-level gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
Loss = Callable[[Tensor, Inputs, Tensor, Config], Tensor]


def cross_entropy(logprobs: Tensor, inputs: Inputs, sequence: Tensor, config: Config) -> Tensor:
    """-sum w p. Weights are any real numbers; missing ones are 1."""
    weights = inputs.get("weights")
    return -(logprobs if weights is None else weights * logprobs).sum()


def importance_sampling(logprobs: Tensor, inputs: Inputs, sequence: Tensor, config: Config) -> Tensor:
    """-sum r A."""
    return -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()


def ppo(logprobs: Tensor, inputs: Inputs, sequence: Tensor, config: Config) -> Tensor:
    """-sum min(r A, clip(r, low, high) A)."""
    return _clipped(_ratio(logprobs, inputs), inputs, config)


def cispo(logprobs: Tensor, inputs: Inputs, sequence: Tensor, config: Config) -> Tensor:
    """-sum sg(clip(r, low, high)) p A: the clipped ratio weighs a token, and never silences it."""
    clipped = _clip(_ratio(logprobs, inputs).detach(), inputs, config)
    return -(clipped * logprobs * inputs["advantages"]).sum()


def dro(logprobs: Tensor, inputs: Inputs, sequence: Tensor, config: Config) -> Tensor:
    """-sum (p A - beta/2 (p - q)^2).

    The RL losses have no mask: clients mark what was not sampled with A = 0 and q = 0. Such positions are left out
    here, or the square would pull at the prompt; the documentation is silent on it.
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


LOSS_FUNCTIONS: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """exp(p - q), and 1 where the advantage is 0: masked positions carry q = 0 and would overflow for nothing."""
    gap = logprobs - inputs["logprobs"]
    return torch.exp(torch.where(inputs["advantages"] != 0, gap, torch.zeros_like(gap)))


def _clip(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Clamp to the bounds, per token where the inputs give them."""
    low = inputs.get("clip_low_threshold", torch.full_like(ratio, config["clip_low_threshold"]))
    high = inputs.get("clip_high_threshold", torch.full_like(ratio, config["clip_high_threshold"]))
    return torch.minimum(torch.maximum(ratio, low), high)


def _clipped(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs, config) * advantages).sum()
