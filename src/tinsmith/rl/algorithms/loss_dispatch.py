"""Decide where a loss is computed: by the server if it has exactly this loss, else by the client.

The server's losses are sums over tokens and linear in the advantages, so the weights of the aggregate are multiplied
into advantages and masks, and a step takes one forward_backward. Any other loss is computed here from the logprobs of
one more forward pass; the SDK sends its gradient as weights of cross_entropy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.algorithms.losses.base import Aggregate, PolicyLoss, Tokens, aggregate_weights
from tinsmith.rl.algorithms.losses.policy_gradient import CispoLoss, DroLoss, GspoLoss, ImportanceSamplingLoss, PpoLoss
from tinsmith.rl.algorithms.losses.supervised import MixtureLoss, OpmdLoss, SftLoss
from tinsmith.rl.algorithms.regularizers import divergence, sampled_entropy
from tinsmith.rl.policy.base import Update
from tinsmith.rl.policy.training_rows import TrainingRow, scatter_to_rows

_ESTIMATORS = ("k1", "k2", "k3")
_KL = frozenset(("kl_coef", "kl_estimator", "kl_mask", "ref_logprobs"))
_ENTROPY = frozenset(("entropy_coef", "entropy_mask"))
_DUAL_CLIP = "dual_clip"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossContext:
    """Values of the loss that change from step to step."""

    step: int
    kl_coef: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoss:
    """A loss function of the server that equals a policy loss."""

    name: str
    config: Mapping[str, float]
    weights_only: bool = False
    """Whether the inputs are `weights` (cross_entropy) in place of logprobs and advantages."""
    sequence_mask: bool = False
    """Whether the inputs include sequence_ratio_mask."""


def server_loss(config: AlgorithmConfig, extensions: frozenset[str]) -> ServerLoss | None:
    """The server's loss that equals the configured loss with its terms; None if there is none."""
    if config.kl.enabled and not (config.kl.type in _ESTIMATORS and extensions >= _KL):
        return None
    if config.entropy.coef and not extensions >= _ENTROPY:
        return None
    if config.correction.enabled:
        return _corrected_loss(config)
    if isinstance(config.loss, DroLoss):  # its quadratic term cannot be weighted
        return ServerLoss(name="dro", config={"beta": config.loss.beta}) if config.aggregate == "token_sum" else None
    return _policy_loss(config.loss, extensions)


def _corrected_loss(config: AlgorithmConfig) -> ServerLoss | None:
    """cispo with the cap as its bound, which has the gradient of every loss that only bounds the corrected ratio, 1."""
    if (config.correction.type, config.correction.level) != ("tis", "token"):
        return None
    match config.loss:
        case ImportanceSamplingLoss() | PpoLoss(mask_drift=None) | CispoLoss() | GspoLoss():
            bounds = {"clip_low_threshold": 0.0, "clip_high_threshold": config.correction.cap}
            return ServerLoss(name="cispo", config=bounds)
        case _:
            return None


def _policy_loss(loss: PolicyLoss, extensions: frozenset[str]) -> ServerLoss | None:
    match loss:
        case ImportanceSamplingLoss():
            return ServerLoss(name="importance_sampling", config={})
        case PpoLoss(on_policy=False, mask_drift=None) if loss.dual_clip is None or _DUAL_CLIP in extensions:
            dual = {} if loss.dual_clip is None else {_DUAL_CLIP: loss.dual_clip}
            return ServerLoss(name="ppo", config={**_bounds(loss.clip_low, loss.clip_high), **dual})
        case CispoLoss(mask=False):
            return ServerLoss(name="cispo", config=_bounds(loss.clip_low, loss.clip_high))
        case GspoLoss():
            return ServerLoss(name="gspo", config=_bounds(loss.clip_low, loss.clip_high), sequence_mask=True)
        case OpmdLoss() | SftLoss():
            return ServerLoss(name="cross_entropy", config={}, weights_only=True)
        case _:
            return None


def _bounds(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": max(0.0, 1.0 - low), "clip_high_threshold": 1.0 + high}


def tokens_of_rows(rows: Sequence[TrainingRow], config: AlgorithmConfig, step: int) -> Tokens:
    """All tokens inside the masks of the rows, concatenated."""

    def flat(columns: Sequence[np.ndarray]) -> Tensor:
        pieces = [np.asarray(column, np.float64)[row.mask] for row, column in zip(rows, columns, strict=True)]
        return torch.from_numpy(np.concatenate([np.zeros(0), *pieces]))

    lengths = torch.tensor([int(row.mask.sum()) for row in rows], dtype=torch.long)
    sequence = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    counts = torch.tensor([float(row.count) for row in rows], dtype=torch.float64)[sequence]
    expert = torch.tensor([row.kind == "expert" for row in rows], dtype=torch.bool)[sequence]
    chosen = [at for at, row in enumerate(rows) if row.kind == "chosen"]
    rejected = [at for at, row in enumerate(rows) if row.kind == "rejected"]
    own_aggregate = config.loss.expert_aggregate if isinstance(config.loss, MixtureLoss) else None
    kinds: tuple[tuple[Aggregate, Tensor], ...] = (
        (config.aggregate, expert | ~expert),
        (config.aggregate, ~expert),
        (own_aggregate or config.aggregate, expert),
    )
    weights = [aggregate_weights(aggregate, sequence, counts, among) for aggregate, among in kinds]
    return Tokens(
        old=flat([row.logprobs for row in rows]),
        advantages=flat([row.advantages for row in rows]),
        sequence=sequence,
        counts=counts,
        expert=expert,
        weights=weights[0],
        policy_weights=weights[1],
        expert_weights=weights[2],
        reference=flat([row.columns["reference"] for row in rows]) if config.loss_reads_reference else None,
        pairs=torch.tensor(list(zip(chosen, rejected, strict=True))) if chosen else None,
        step=step,
    )


def objective(
    logprobs: Tensor, batch: Tokens, config: AlgorithmConfig, context: LossContext
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss with its terms for logprobs [T], and its metrics; divergence and entropy are means over tokens."""
    corrected, numbers = config.correction.corrected(logprobs, batch) if config.correction.enabled else (batch, {})
    loss, metrics = config.loss.total(logprobs, corrected)
    numbers |= {"policy_loss": loss, **metrics}
    counts = batch.counts * ~batch.expert
    total = counts.sum().clamp(min=1.0)
    if context.kl_coef and batch.reference is not None and config.kl.enabled:
        values = divergence(config.kl.type, logprobs, batch.old, batch.reference) * counts
        numbers["kl"] = values.sum() / total
        loss = loss + context.kl_coef * (batch.weights * values).sum()
    if config.entropy.coef:
        values, surrogate = sampled_entropy(logprobs, batch)
        numbers["entropy"] = (values * counts).sum() / total
        bonus = surrogate - surrogate.detach() + values  # the value of `values` with the gradient of `surrogate`
        loss = loss - config.entropy.coef * (batch.weights * counts * bonus).sum()
    return loss, numbers


def update_by_server(
    rows: Sequence[TrainingRow], batch: Tokens, config: AlgorithmConfig, context: LossContext, loss: ServerLoss
) -> Update:
    """An update by one forward_backward with a loss of the server."""
    scaled_advantages = batch.weights * (batch.counts if isinstance(config.loss, SftLoss) else batch.advantages)
    if isinstance(config.loss, OpmdLoss):
        scaled_advantages = scaled_advantages / (1.0 + config.loss.tau)
    masks_N = scatter_to_rows(rows, (batch.weights * batch.counts * ~batch.expert).numpy())
    inputs: list[Mapping[str, np.ndarray]] = []
    for row, column, mask in zip(rows, scatter_to_rows(rows, scaled_advantages.numpy()), masks_N, strict=True):
        arrays = {"weights": column} if loss.weights_only else {"logprobs": row.logprobs, "advantages": column}
        if loss.sequence_mask:
            arrays["sequence_ratio_mask"] = row.mask.astype(np.float32)
        if config.kl.enabled:
            arrays |= {"ref_logprobs": row.columns["reference"], "kl_mask": mask}
        if config.entropy.coef:
            arrays["entropy_mask"] = mask
        inputs.append(arrays)
    settings: dict[str, float | str] = dict(loss.config)
    if config.kl.enabled:
        settings |= {"kl_coef": context.kl_coef, "kl_estimator": config.kl.type}
    if config.entropy.coef:
        settings["entropy_coef"] = config.entropy.coef

    def measure(logprobs: Sequence[np.ndarray]) -> dict[str, float]:
        columns = [row_logprobs[row.mask] for row, row_logprobs in zip(rows, logprobs, strict=True)]
        flat = torch.from_numpy(np.concatenate(columns).astype(np.float64))
        corrected, numbers = config.correction.corrected(flat, batch) if config.correction.enabled else (batch, {})
        return {name: float(number) for name, number in (numbers | config.loss.total(flat, corrected)[1]).items()}

    return Update(rows=tuple(rows), inputs=tuple(inputs), loss=loss.name, config=settings, measure=measure)


def update_by_client(
    rows: Sequence[TrainingRow], batch: Tokens, config: AlgorithmConfig, context: LossContext
) -> Update:
    """An update whose loss the client computes from the logprobs of one more forward pass."""
    masks = [torch.from_numpy(row.mask) for row in rows]

    def loss(logprobs: Sequence[Any]) -> tuple[Tensor, dict[str, float]]:
        flat = torch.cat([row_logprobs.double()[mask] for row_logprobs, mask in zip(logprobs, masks, strict=True)])
        value, numbers = objective(flat, batch, config, context)
        return value, {name: float(number.detach()) for name, number in numbers.items()}

    return Update(rows=tuple(rows), client=loss)
