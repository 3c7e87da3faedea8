"""Decide where a loss is computed: by the server if it has exactly this loss, else by the client.

The server's losses are sums over tokens and linear in the advantages, so the weights of the aggregate are multiplied
into advantages and masks, and a step takes one forward_backward. Any other loss is computed here from the logprobs of
one more forward pass; the SDK sends its gradient as weights of cross_entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tinsmith.rl.algorithms.arrays import Array, at_least_one, without_gradient
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.algorithms.losses.base import Aggregate, PolicyLoss, Tokens, aggregate_weights
from tinsmith.rl.algorithms.losses.policy_gradient import CispoLoss, DroLoss, GspoLoss, ImportanceSamplingLoss, PpoLoss
from tinsmith.rl.algorithms.losses.supervised import MixtureLoss, OpmdLoss, SftLoss
from tinsmith.rl.algorithms.losses.user_code import CustomLoss
from tinsmith.rl.algorithms.regularizers import divergence, sampled_entropy
from tinsmith.rl.policy.trainer import Update
from tinsmith.rl.policy.training_rows import TEACHER_TOP, TrainingRow, scatter_to_rows

_ESTIMATORS = ("k1", "k2", "k3")
_KL = frozenset(("kl_coef", "kl_estimator", "kl_mask", "ref_logprobs"))
_ENTROPY = frozenset(("entropy_coef", "entropy_mask"))
_DUAL_CLIP = "dual_clip"
UPLOADED = "custom"
"""The loss of a server that was uploaded."""
EXTENSIONS = _KL | _ENTROPY | {_DUAL_CLIP}
"""Loss inputs and settings that a server may add to the Tinker API, and that losses here use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossContext:
    """Values of the loss that change from step to step."""

    step: int
    kl_coef: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoss:
    """A loss function of the server that equals a policy loss."""

    name: str
    config: Mapping[str, float | str]
    weights_only: bool = False
    """Whether the inputs are `weights` (cross_entropy) in place of logprobs and advantages."""
    sequence_mask: bool = False
    """Whether the inputs include sequence_ratio_mask."""


def server_loss(
    config: AlgorithmConfig, extensions: frozenset[str], *, anchored: bool = False, uploaded: str = ""
) -> ServerLoss | None:
    """The server's loss that equals the configured loss with its terms; None if there is none.

    `anchored`: batches have the column `proximal`, so that weights and masks are known before the forward pass.
    `uploaded`: id of the configured loss at the server, if it is one that was uploaded.
    """
    if uploaded:
        return ServerLoss(name=UPLOADED, config={"loss_id": uploaded})
    if config.kl.enabled and not (config.kl.type in _ESTIMATORS and extensions >= _KL):
        return None
    if config.entropy.coef and not extensions >= _ENTROPY:
        return None
    if config.correction.changes_loss and not anchored:
        return _corrected_loss(config) if config.correction.mask == "none" else _masked_loss(config, extensions)
    if isinstance(config.loss, DroLoss):  # its quadratic term cannot be weighted
        return ServerLoss(name="dro", config={"beta": config.loss.beta}) if config.aggregate == "token_sum" else None
    return _policy_loss(config.loss, extensions)


def uploadable(config: AlgorithmConfig, *, anchored: bool = False) -> Callable[..., Any]:
    """The loss of a row that a server which runs uploaded losses can compute. Raises ValueError if it cannot."""
    if not isinstance(config.loss, CustomLoss):
        raise ValueError("it is not a loss of one's own")
    if config.kl.enabled or config.entropy.coef:
        raise ValueError("an uploaded loss has no terms kl and entropy")
    if config.correction.changes_loss and not anchored:
        raise ValueError("algorithm.correction weights its tokens")
    return config.loss.row_loss()


def _corrected_loss(config: AlgorithmConfig) -> ServerLoss | None:
    """cispo with the cap as its bound, which has the gradient of every loss that only bounds the corrected ratio, 1."""
    match config.correction.type, config.correction.level:
        case "tis", "token":
            bounds = {"clip_low_threshold": 0.0, "clip_high_threshold": config.correction.cap}
        case "proximal", _:
            bounds = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}
        case _:
            return None
    match config.loss:
        case ImportanceSamplingLoss() | PpoLoss(mask_drift=None) | CispoLoss() | GspoLoss():
            return ServerLoss(name="cispo", config=bounds)
        case _:
            return None


def _masked_loss(config: AlgorithmConfig, extensions: frozenset[str]) -> ServerLoss | None:
    """ppo with the bounds of the mask: its gradient is 0 exactly where the mask of tokens ignores them."""
    if config.correction.enabled or config.correction.mask != "token":
        return None
    low, high = config.correction.mask_bounds
    match config.loss:
        case ImportanceSamplingLoss():
            loss = PpoLoss(clip_low=1 - low, clip_high=high - 1, dual_clip=None)
        case PpoLoss(on_policy=False, mask_drift=None) as ppo:
            bounds = {"clip_low": min(ppo.clip_low, 1 - low), "clip_high": min(ppo.clip_high, high - 1)}
            loss = ppo.model_copy(update=bounds)
        case _:
            return None
    return _policy_loss(loss, extensions)


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
    """All tokens inside the masks of the rows, concatenated, in arrays of NumPy."""

    def flat(columns: Sequence[np.ndarray]) -> np.ndarray:
        pieces = [np.asarray(column, np.float64)[row.mask] for row, column in zip(rows, columns, strict=True)]
        return np.concatenate([np.zeros(0), *pieces])

    lengths = np.array([row.mask.sum() for row in rows], np.int64)
    sequence = np.repeat(np.arange(len(rows)), lengths)
    counts = np.array([row.count for row in rows], np.float64)[sequence]
    expert = np.array([row.kind in ("expert", "mismatched") for row in rows], bool)[sequence]
    kinds_N = np.array([row.kind for row in rows])
    chosen, rejected, desirable, undesirable, mismatched = (
        np.flatnonzero(kinds_N == kind) for kind in ("chosen", "rejected", "desirable", "undesirable", "mismatched")
    )
    labels = len(desirable) + len(undesirable)
    own_aggregate = config.loss.expert_aggregate if isinstance(config.loss, MixtureLoss) else None
    kinds: tuple[tuple[Aggregate, np.ndarray], ...] = (
        (config.aggregate, ~np.isin(sequence, mismatched)),
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
        proximal=flat([row.columns.get("proximal", row.logprobs) for row in rows]) if _anchored(rows) else None,
        teacher_top=_teacher_top(rows) if config.loss.reads_teacher_top else None,
        pairs=np.stack([chosen, rejected], axis=1) if len(chosen) else None,
        desirable=desirable if labels else None,
        undesirable=undesirable if labels else None,
        mismatched=mismatched if len(mismatched) else None,
        step=step,
    )


def _teacher_top(rows: Sequence[TrainingRow]) -> np.ndarray:
    return np.concatenate([np.asarray(row.columns[TEACHER_TOP], np.float64)[row.mask, 1] for row in rows])


def _anchored(rows: Sequence[TrainingRow]) -> bool:
    return any("proximal" in row.columns for row in rows)


def objective(
    logprobs: Array, batch: Tokens, config: AlgorithmConfig, context: LossContext
) -> tuple[Array, dict[str, Array]]:
    """The loss with its terms for logprobs [T], and its metrics; divergence and entropy are means over tokens."""
    corrected, numbers = _corrected(logprobs, batch, config)
    loss, metrics = config.loss.total(logprobs, corrected)
    numbers |= {"policy_loss": loss, **metrics}
    counts = batch.counts * ~batch.expert
    total = at_least_one(counts.sum())
    if context.kl_coef and batch.reference is not None and config.kl.enabled:
        values = divergence(config.kl.type, logprobs, batch.old, batch.reference) * counts
        numbers["kl"] = values.sum() / total
        loss = loss + context.kl_coef * (batch.weights * values).sum()
    if config.entropy.coef:
        values, surrogate = sampled_entropy(logprobs, batch)
        numbers["entropy"] = (values * counts).sum() / total
        # the value of `values` with the gradient of `surrogate`
        bonus = surrogate - without_gradient(surrogate) + values
        loss = loss - config.entropy.coef * (batch.weights * counts * bonus).sum()
    return loss, numbers


def _corrected(logprobs: Array, batch: Tokens, config: AlgorithmConfig) -> tuple[Tokens, dict[str, Array]]:
    return config.correction.corrected(logprobs, batch) if config.correction.changes_loss else (batch, {})


def update_by_server(
    rows: Sequence[TrainingRow], batch: Tokens, config: AlgorithmConfig, context: LossContext, loss: ServerLoss
) -> Update:
    """An update by one forward_backward with a loss of the server."""
    old_N = [row.logprobs for row in rows]
    weights = batch.weights
    if batch.proximal is not None:
        anchored, _ = config.correction.corrected(batch.proximal, batch)
        old_N, weights = scatter_to_rows(rows, anchored.old), anchored.weights
    scaled_advantages = weights * (batch.counts if isinstance(config.loss, SftLoss) else batch.advantages)
    if isinstance(config.loss, OpmdLoss):
        scaled_advantages = scaled_advantages / (1.0 + config.loss.tau)
    if loss.name == UPLOADED:
        return _update_by_uploaded(rows, batch, config, loss, scatter_to_rows(rows, weights), old_N)
    masks_N = scatter_to_rows(rows, batch.weights * batch.counts * ~batch.expert)
    inputs: list[Mapping[str, np.ndarray]] = []
    columns_N = scatter_to_rows(rows, scaled_advantages)
    for row, column, old, mask in zip(rows, columns_N, old_N, masks_N, strict=True):
        arrays = {"weights": column} if loss.weights_only else {"logprobs": old, "advantages": column}
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

    measure = partial(_measured, rows, batch, config)
    return Update(rows=tuple(rows), inputs=tuple(inputs), loss=loss.name, config=settings, measure=measure)


def _update_by_uploaded(
    rows: Sequence[TrainingRow],
    batch: Tokens,
    config: AlgorithmConfig,
    loss: ServerLoss,
    weights_N: Sequence[np.ndarray],
    old_N: Sequence[np.ndarray],
) -> Update:
    """An update by one forward_backward with a loss that was uploaded."""
    inputs = [
        {
            "mask": row.mask.astype(np.float32),
            "weights": weights,
            "sampling_logprobs": old,
            "advantages": row.advantages,
            **({"reference_logprobs": row.columns["reference"]} if config.loss.reads_reference else {}),
        }
        for row, weights, old in zip(rows, weights_N, old_N, strict=True)
    ]
    measure = partial(_measured, rows, batch, config)
    return Update(rows=tuple(rows), inputs=tuple(inputs), loss=loss.name, config=loss.config, measure=measure)


def _measured(
    rows: Sequence[TrainingRow], batch: Tokens, config: AlgorithmConfig, logprobs: Sequence[np.ndarray]
) -> dict[str, float]:
    """Metrics of a loss that the server computes, from the logprobs of the rows that it returns."""
    columns = [row_logprobs[row.mask] for row, row_logprobs in zip(rows, logprobs, strict=True)]
    flat = np.concatenate(columns).astype(np.float64)
    corrected, numbers = _corrected(flat, batch, config)
    return {name: float(number) for name, number in (numbers | config.loss.total(flat, corrected)[1]).items()}


def update_by_client(
    rows: Sequence[TrainingRow], batch: Tokens, config: AlgorithmConfig, context: LossContext
) -> Update:
    """An update whose loss the client computes, with PyTorch, from the logprobs of one more forward pass."""
    import torch

    tensors = batch.as_tensors()
    masks = [torch.from_numpy(row.mask) for row in rows]

    def loss(logprobs: Sequence[Any]) -> tuple[Array, dict[str, float]]:
        flat = torch.cat([row_logprobs.double()[mask] for row_logprobs, mask in zip(logprobs, masks, strict=True)])
        tokens = tensors
        if config.loss.reads_teacher_top:
            flat, tokens = flat[:, 0], replace(tensors, student_top=flat[:, 1:])
        value, numbers = objective(flat, tokens, config, context)
        return value, {name: float(number.detach()) for name, number in numbers.items()}

    likeliest = [row.columns[TEACHER_TOP][:, 0] for row in rows] if config.loss.reads_teacher_top else []
    return Update(rows=tuple(rows), client=loss, more_targets=tuple(ids_NK.astype(np.int64) for ids_NK in likeliest))
