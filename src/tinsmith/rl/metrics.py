"""Metrics of a step, from its rollouts, its training rows and the result of the update. Pure arithmetic.

Estimates over the policy's tokens, with q the logprobs of the sampler and p those of the trainer before the update:
optim/ratio_mean = mean(exp(p - q)), optim/kl_sample_train_v1 = mean(q - p), optim/kl_sample_train_v2 =
mean((q - p)^2) / 2, optim/entropy = -mean(q).
With staleness 0, p and q agree up to rounding, so a v2 far above 1e-3 means that the sampler does not use the weights
of the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tinsmith.rl.policy.base import UpdateResult
from tinsmith.rl.policy.training_rows import TrainingRow, count_policy_tokens
from tinsmith.rl.types import POLICY, Group, Rollout

_LOG_RATIO = 20.0
"""Bound of a log ratio before it is exponentiated, as in the losses."""


def group_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Rewards, lengths, failures and staleness of a batch, before weights of `version` train on it."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    good = [rollout for rollout in rollouts if not rollout.error]
    lengths = [count_policy_tokens(rollout) for rollout in good]
    staleness = [version - group.version for group in groups]
    return {
        **reward_metrics("reward", good),
        **role_metrics("reward", good),
        "groups/constant": _mean([group.constant for group in groups]),
        **_constant_roles(groups),
        "rollouts/failed": len(rollouts) - len(good),
        "rollouts/cut": _mean([any(each.truncated for each in rollout.trajectories) for rollout in good]),
        **_terminations(rollouts),
        "tokens/sampled": sum(lengths),
        "tokens/reply": _mean(lengths),
        "policy/staleness": _mean(staleness),
        "policy/staleness_max": max(staleness, default=0),
        "policy/drift": _mean([_drift(group) for group in groups]),
    }


def _drift(group: Group) -> int:
    """Number of updates while the group was sampled."""
    versions = [turn.version for rollout in group.rollouts for turn in rollout.turns]
    return max(versions, default=group.version) - group.version


def role_metrics(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean reward and number of turns of each role, if there are several; and the workflow's own metrics.

    `prefix` is that of rewards, such as eval/reward.
    """
    values, place = dict[str, float](), prefix.removesuffix("reward")
    for role in dict.fromkeys(role for rollout in rollouts for role in rollout.roles if role != POLICY):
        of_role = [each for rollout in rollouts for each in rollout.trajectories if each.role == role]
        values[f"{prefix}/{role}/mean"] = _mean([each.reward for each in of_role])
        values[f"{prefix}/{role}/std"] = float(np.std([each.reward for each in of_role]))
        values[f"{place}turns/{role}"] = _mean([len(each.turns) for each in of_role])
        values[f"{place}tokens/{role}"] = _mean([sum(len(turn.tokens) for turn in each.turns) for each in of_role])
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.metrics):
        values[f"{place}workflow/{name}"] = _mean(
            [rollout.metrics[name] for rollout in rollouts if name in rollout.metrics]
        )
    return values


def _constant_roles(groups: Sequence[Group]) -> dict[str, float]:
    """Share of groups without a signal for each role, if there are several."""
    roles = dict.fromkeys(role for group in groups for role in group.roles if role != POLICY)
    return {
        f"groups/{role}/constant": _mean([group.constant_role(role) for group in groups if role in group.roles])
        for role in roles
    }


def _terminations(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Share of rollouts that ended at each limit, if any did."""
    reasons = sorted({rollout.termination for rollout in rollouts} - {"done", "error"})
    return {f"rollouts/{reason}": _mean([rollout.termination == reason for rollout in rollouts]) for reason in reasons}


def reward_metrics(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean and standard deviation of the reward, and the mean of each part over the rollouts that have it."""
    values = {f"{prefix}/mean": _mean([rollout.reward for rollout in rollouts])}
    values[f"{prefix}/std"] = float(np.std([rollout.reward for rollout in rollouts])) if rollouts else 0.0
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.reward_parts):
        parts = [rollout.reward_parts[name] for rollout in rollouts if name in rollout.reward_parts]
        values[f"{prefix}/{name}"] = _mean(parts)
    return values


def update_metrics(
    rows: Sequence[TrainingRow], updated: UpdateResult, measured: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Metrics of an update: trainer against sampler logprobs, those of the loss, and those of the server.

    `measured`: metrics of a loss that the server computed (`Update.measure`).
    """
    pairs = list(zip(rows, updated.logprobs, strict=True))
    own = [(row, p) for row, p in pairs if row.kind == "policy"]
    expert_logprobs = [p[row.mask] for row, p in pairs if row.kind == "expert"]
    return {
        **(_policy_metrics(own) if own else {}),
        **({"optim/expert_nll": -float(np.concatenate(expert_logprobs).mean())} if expert_logprobs else {}),
        "tokens/trained": int(sum(len(row.tokens) for row in rows)),
        "optim/rows": len(rows),
        **_loss_metrics(measured or {}),
        **_loss_metrics(updated.metrics),
    }


def _policy_metrics(pairs: Sequence[tuple[TrainingRow, np.ndarray]]) -> dict[str, float]:
    q_T = np.concatenate([row.logprobs[row.mask] for row, _ in pairs]).astype(np.float64)
    p_T = np.concatenate([p[row.mask] for row, p in pairs]).astype(np.float64)
    weight_T = np.concatenate([np.full(int(row.mask.sum()), row.count) for row, _ in pairs])
    ratio_T = np.exp(np.clip(p_T - q_T, -_LOG_RATIO, _LOG_RATIO))
    return {
        "optim/ratio_mean": float(np.average(ratio_T, weights=weight_T)),
        "optim/ratio_max": float(ratio_T.max()),
        "optim/kl_sample_train_v1": float(np.average(q_T - p_T, weights=weight_T)),
        "optim/kl_sample_train_v2": float(np.average((q_T - p_T) ** 2, weights=weight_T)) / 2,
        "optim/entropy": -float(np.average(q_T, weights=weight_T)),
    }


def _loss_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a loss or of the server, with `name` or `name:reduction` renamed to `optim/name`."""
    return {f"optim/{name.partition(':')[0]}": float(value) for name, value in metrics.items()}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
