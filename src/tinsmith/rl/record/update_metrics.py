"""Metrics of the optimizer steps of a batch. Pure arithmetic.

Estimates over the policy's tokens, with q the logprobs of the sampler, p those of the trainer before each optimizer
step, r = exp(p - q), and ref those of the reference:

- optim/ratio_mean, _min, _max: of r. optim/ess_tokens = (sum r)^2 / (n sum r^2), the effective share of the n tokens,
  and optim/ess_sequences the same of rows, with the product of r over a row.
- optim/kl_sample_train_v1 = mean(q - p), the k1 estimate of KL(sampler || trainer), optim/kl_sample_train_v2 =
  mean((q - p)^2) / 2, and optim/kl_sample_train_k3 = mean(r - 1 - log r), before the first optimizer step of the batch.
- optim/kl_reference_k1 = mean(p - ref) and optim/kl_reference_k3 = mean(exp(ref - p) - 1 - (ref - p)).
- optim/entropy = -mean(q).

With staleness 0, p and q agree up to rounding before the first optimizer step, so a v2 far above 1e-3 means that the
sampler does not use the weights of the trainer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tinsmith.rl.policy.trainer import Update, UpdateResult
from tinsmith.rl.policy.training_rows import TrainingRow

_LOG_RATIO = 20.0
"""Bound of a log ratio before it is exponentiated, as in the losses."""
_SUMS = ("loss", "policy_loss", "surrogate_loss", "mix/policy", "mix/expert")
"""Metrics of parts of one gradient that add up; of the others, the mean over tokens is reported."""

Results = Sequence[tuple[Update, UpdateResult]]
_Pairs = Sequence[tuple[TrainingRow, np.ndarray]]


def update_metrics(results: Results, *, streamed: bool = False) -> dict[str, float]:
    """Metrics of the updates of a batch, or of the parts of one update that is `streamed`.

    Of several updates, means and extremes are over all of them. Metrics of losses and of the server are `optim/` plus
    their name.
    """
    pairs = [pair for update, result in results for pair in zip(update.rows, result.logprobs, strict=True)]
    first = pairs if streamed else pairs[: len(results[0][0].rows)]
    expert_logprobs = [p[row.mask] for row, p in pairs if row.kind == "expert"]
    return {
        **_ratio_metrics(_of_policy(pairs)),
        **_mismatch_metrics(_of_policy(first)),
        **_reference_metrics(pairs),
        **({"optim/expert_nll": -float(np.concatenate(expert_logprobs).mean())} if expert_logprobs else {}),
        "tokens/trained": sum(len(row.tokens) for row, _ in pairs),
        "optim/rows": len({id(row) for row, _ in pairs}),
        "optim/steps": 1 if streamed else len(results),
        **_loss_metrics(results, streamed),
    }


def _of_policy(pairs: _Pairs) -> _Pairs:
    return [(row, p) for row, p in pairs if row.kind == "policy"]


def _columns(pairs: _Pairs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q, p, count) of all tokens, float64 [T]."""
    q_T = np.concatenate([row.logprobs[row.mask] for row, _ in pairs]).astype(np.float64)
    p_T = np.concatenate([p[row.mask] for row, p in pairs]).astype(np.float64)
    return q_T, p_T, np.concatenate([np.full(int(row.mask.sum()), row.count, np.float64) for row, _ in pairs])


def _ratio_metrics(pairs: _Pairs) -> dict[str, float]:
    if not pairs:
        return {}
    q_T, p_T, count_T = _columns(pairs)
    ratio_T = _exp(p_T - q_T)
    sequence_R = np.array([float((p[row.mask].astype(np.float64) - row.logprobs[row.mask]).sum()) for row, p in pairs])
    return {
        "optim/ratio_mean": float(np.average(ratio_T, weights=count_T)),
        "optim/ratio_min": float(ratio_T.min()),
        "optim/ratio_max": float(ratio_T.max()),
        "optim/ess_tokens": effective_share(p_T - q_T, count_T),
        "optim/ess_sequences": effective_share(sequence_R, np.array([row.count for row, _ in pairs], np.float64)),
        "optim/entropy": -float(np.average(q_T, weights=count_T)),
    }


def effective_share(log_weights: np.ndarray, counts: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2) of importance weights given as logarithms, each of which counts `counts` times."""
    weights = np.exp(log_weights - log_weights.max())
    return float((counts * weights).sum() ** 2 / (counts.sum() * (counts * weights**2).sum()))


def _mismatch_metrics(pairs: _Pairs) -> dict[str, float]:
    if not pairs:
        return {}
    q_T, p_T, count_T = _columns(pairs)
    d_T = p_T - q_T
    return {
        "optim/kl_sample_train_v1": float(np.average(q_T - p_T, weights=count_T)),
        "optim/kl_sample_train_v2": float(np.average(d_T**2, weights=count_T)) / 2,
        "optim/kl_sample_train_k3": float(np.average(_exp(d_T) - 1 - d_T, weights=count_T)),
    }


def _reference_metrics(pairs: _Pairs) -> dict[str, float]:
    compared = [(row, p) for row, p in _of_policy(pairs) if "reference" in row.columns]
    if not compared:
        return {}
    _, p_T, count_T = _columns(compared)
    reference_T = np.concatenate([row.columns["reference"][row.mask] for row, _ in compared])
    d_T = p_T - reference_T.astype(np.float64)
    return {
        "optim/kl_reference_k1": float(np.average(d_T, weights=count_T)),
        "optim/kl_reference_k3": float(np.average(_exp(-d_T) - 1 + d_T, weights=count_T)),
    }


def _loss_metrics(results: Results, streamed: bool) -> dict[str, float]:
    """Metrics of the losses and the server: means weighted by tokens, and sums of what adds up over parts."""
    values: dict[str, list[float]] = defaultdict(list)
    weights: dict[str, list[float]] = defaultdict(list)
    for update, result in results:
        measured = update.measure(result.logprobs) if update.measure else {}
        tokens = float(sum(row.count * int(row.mask.sum()) for row in update.rows))
        for name, value in [*_plain(measured).items(), *_plain(result.metrics).items()]:
            values[name].append(value)
            weights[name].append(tokens)
    return {
        f"optim/{name}": float(sum(each) if streamed and name in _SUMS else np.average(each, weights=weights[name]))
        for name, each in values.items()
    }


def _plain(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with `name:reduction` renamed to `name`."""
    return {name.partition(":")[0]: float(value) for name, value in metrics.items()}


def _exp(log_ratio_T: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(log_ratio_T, -_LOG_RATIO, _LOG_RATIO))
