"""Metrics of the rollouts of a step or an evaluation. Pure arithmetic; `update_metrics` has those of optimizer steps.

Skill scores say how much better the predictions of a policy are than a trivial answer.

    skill = 1 - sum(error) / sum(error of the trivial answer)

1 is perfect, 0 is the trivial answer, below 0 is worse than it. A workflow reports each prediction in the metrics of
its rollout, under a name X:

    X/error                 error of the prediction
    X/baseline              error of the trivial answer; or, where the trivial answer is the mean of all true values:
    X/truth                 the true value. The error of the mean is the variance, so X/error must be a squared error.

Sums are over rollouts. A name X/PART adds to X too, with the mean true value of each part by itself.

An answer to a held-out task is right if its rewards or its workflow say so; where none of them says, if its reward
reaches a threshold. pass@k is the unbiased estimate of the probability that at least one of k answers is right:
1 - C(n - c, k) / C(n, k) with c of n right, averaged over tasks. A failed rollout is wrong.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tinsmith.rl.types import POLICY, Group, Rollout

_LARGEST_LAG = 9
"""Tokens that are older count as this old."""
ERROR = "/error"
"""End of the name of a metric that is the error of a prediction."""
_NO_ERROR = 1e-6
"""A mean error below this is none: there is nothing to predict."""


def group_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Rewards, lengths, failures and staleness of a batch, before weights of `version` train on it.

    In a run with environments, those of each environment too, as env/NAME/…; numbers of workflows are only there.
    """
    environments = sorted({group.task.environment for group in groups} - {""})
    values = {**_sampled(groups, version), **_lags(groups, version)}
    for name in environments:
        own = [group for group in groups if group.task.environment == name]
        of_environment = {**_sampled(own, version), **_of_workflows(own), "groups/sampled": len(own)}
        values |= {f"env/{name}/{key}": value for key, value in of_environment.items()}
    return values if environments else {**values, **_of_workflows(groups)}


def _lags(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Share of the sampled tokens by the age of the weights that sampled them, in updates."""
    turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns if not turn.model]
    tokens: dict[int, int] = {}
    for turn in turns:
        lag = min(max(0, version - turn.version), _LARGEST_LAG)
        tokens[lag] = tokens.get(lag, 0) + len(turn.tokens)
    total = max(1, sum(tokens.values()))
    return {f"policy/lag_{lag}": tokens[lag] / total for lag in sorted(tokens)}


def _of_workflows(groups: Sequence[Group]) -> dict[str, float]:
    return workflow_metrics("workflow", [each for group in groups for each in group.rollouts if not each.error])


def _sampled(groups: Sequence[Group], version: int) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    good = [rollout for rollout in rollouts if not rollout.error]
    lengths = [rollout.sampled_tokens for rollout in good]
    staleness = [version - group.version for group in groups]
    return {
        **reward_metrics("reward", good),
        **role_metrics("reward", good),
        "groups/constant": _mean([group.constant for group in groups]),
        **_constant_roles(groups),
        **_right_groups(groups),
        **equal_replies(groups),
        "rollouts/failed": len(rollouts) - len(good),
        "rollouts/cut": _mean([any(each.truncated for each in rollout.trajectories) for rollout in good]),
        **_terminations(rollouts),
        "tokens/sampled": sum(lengths),
        "tokens/reply": _mean(lengths),
        "policy/staleness": _mean(staleness),
        "policy/staleness_max": max(staleness, default=0),
        "policy/drift": _mean([_drift(group) for group in groups]),
        **_entropy(good),
    }


def _entropy(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Estimate of the entropy of the sampling policy, in nats per token, if it sampled tokens."""
    turns = [turn for rollout in rollouts for turn in rollout.turns if not turn.model]
    count = sum(len(turn.logprobs) for turn in turns)
    return {"policy/entropy": -math.fsum(p for turn in turns for p in turn.logprobs) / count} if count else {}


def _right_groups(groups: Sequence[Group]) -> dict[str, float]:
    """Share of groups whose rollouts are all right, and all wrong, if the workflow or the rewards say what is right."""
    verdicts = [{each.correct for each in group.rollouts if not each.error} for group in groups]
    said = [verdict for verdict in verdicts if verdict and None not in verdict]
    if not said:
        return {}
    return {
        "groups/all_right": _mean([verdict == {True} for verdict in said]),
        "groups/all_wrong": _mean([verdict == {False} for verdict in said]),
    }


def equal_replies(groups: Sequence[Group]) -> dict[str, float]:
    """Share of groups whose replies are all the same text, and share of all replies that are the most frequent text, if
    there are several tasks."""
    texts = [[_replies(each) for each in group.rollouts if not each.error] for group in groups]
    values, compared = dict[str, float](), [replies for replies in texts if len(replies) > 1]
    if compared:
        values["groups/equal"] = _mean([len(set(replies)) == 1 for replies in compared])
    if len({group.task.id for group, replies in zip(groups, texts, strict=True) if replies}) > 1:
        counts = Counter(reply for replies in texts for reply in replies)
        values["rollouts/equal"] = max(counts.values()) / counts.total()
    return values


def _replies(rollout: Rollout) -> tuple[str, ...]:
    """The texts of the policy's turns."""
    return tuple(turn.text for turn in rollout.turns if not turn.model)


def _drift(group: Group) -> int:
    """Number of updates while the group was sampled."""
    versions = [turn.version for rollout in group.rollouts for turn in rollout.turns]
    return max(versions, default=group.version) - group.version


def role_metrics(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean reward and number of turns of each role, if there are several.

    `prefix` is that of rewards, such as eval/reward.
    """
    values, place = dict[str, float](), prefix.removesuffix("reward")
    for role in dict.fromkeys(role for rollout in rollouts for role in rollout.roles if role != POLICY):
        of_role = [each for rollout in rollouts for each in rollout.trajectories if each.role == role]
        values[f"{prefix}/{role}/mean"] = _mean([each.reward for each in of_role])
        values[f"{prefix}/{role}/std"] = float(np.std([each.reward for each in of_role]))
        values[f"{place}turns/{role}"] = _mean([len(each.turns) for each in of_role])
        values[f"{place}tokens/{role}"] = _mean([sum(len(turn.tokens) for turn in each.turns) for each in of_role])
    return values


def workflow_metrics(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """PREFIX/NAME: the workflows' own numbers, each averaged over the rollouts that have it; and skill scores."""
    values = {
        name: _mean([rollout.metrics[name] for rollout in rollouts if name in rollout.metrics])
        for name in dict.fromkeys(name for rollout in rollouts for name in rollout.metrics)
    }
    return {f"{prefix}/{name}": value for name, value in (values | skill_scores(rollouts)).items()}


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


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def skill_scores(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """X/skill for each prediction X of the rollouts, and for the name of its parts; none where the trivial answer has
    no error."""
    names = dict.fromkeys(name for each in rollouts for name in each.metrics if name.endswith(ERROR))
    errors, baselines = defaultdict[str, float](float), defaultdict[str, float](float)
    counts = defaultdict[str, int](int)
    for name in names:
        prediction = name.removesuffix(ERROR)
        reported = [each.metrics for each in rollouts if name in each.metrics]
        baseline = _baseline(prediction, reported)
        if baseline is None:
            continue
        whole = prediction.rpartition("/")[0]
        for part in {prediction, whole} - {""}:
            errors[part] += sum(metrics[name] for metrics in reported)
            baselines[part] += baseline
            counts[part] += len(reported)
    return {
        f"{part}/skill": 1.0 - errors[part] / total
        for part, total in baselines.items()
        if total > _NO_ERROR * counts[part]
    }


def _baseline(prediction: str, reported: Sequence[Mapping[str, float]]) -> float | None:
    """Sum of the errors of the trivial answer; None if the rollouts report neither baseline nor truth."""
    if all(f"{prediction}/baseline" in metrics for metrics in reported):
        return sum(metrics[f"{prediction}/baseline"] for metrics in reported)
    if all(f"{prediction}/truth" in metrics for metrics in reported):
        truths = np.array([metrics[f"{prediction}/truth"] for metrics in reported])
        return float(((truths - truths.mean()) ** 2).sum())
    return None


def pass_at(groups: Sequence[Group], threshold: float, prefix: str = "eval") -> dict[str, float]:
    """PREFIX/pass@k for k = 1, 2, 4, … and n, the number of rollouts of the smallest group."""
    sizes = [len(group.rollouts) for group in groups]
    right = [sum(is_right(rollout, threshold) for rollout in group.rollouts) for group in groups]
    smallest = min(sizes)
    ks = sorted({2**power for power in range(smallest.bit_length()) if 2**power <= smallest} | {smallest})
    estimates = {k: [pass_at_k(n, c, k) for n, c in zip(sizes, right, strict=True)] for k in ks}
    return {f"{prefix}/pass@{k}": float(np.mean(each)) for k, each in estimates.items()}


def is_partial(group: Group, threshold: float) -> bool:
    """Whether some rollouts of a group are right and others are not; failed rollouts do not count."""
    return len({is_right(rollout, threshold) for rollout in group.rollouts if not rollout.error}) == 2


def is_right(rollout: Rollout, threshold: float) -> bool:
    """Whether an answer is right: its rewards or workflow say so, or else its reward reaches the threshold."""
    if rollout.error:
        return False
    return rollout.reward >= threshold - 1e-9 if rollout.correct is None else rollout.correct


def measures_right(rows: Iterable[Mapping[str, float]]) -> bool:
    """Whether pass@k measures something in rows of metrics: rewards or a workflow say what is right, or replies have
    reached eval.threshold."""
    return any(
        name.endswith("groups/all_right") or (name in ("eval/judged", "eval/pass@1") and value > 0)
        for row in rows
        for name, value in row.items()
    )


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k answers is right, from n answers of which c are right."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
