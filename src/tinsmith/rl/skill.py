"""Skill scores: how much better the predictions of a policy are than a trivial answer.

    skill = 1 - sum(error) / sum(error of the trivial answer)

1 is perfect, 0 is the trivial answer, below 0 is worse than it. A workflow reports each prediction in the metrics of
its rollout, under a name X:

    X/error                 error of the prediction
    X/baseline              error of the trivial answer; or, where the trivial answer is the mean of all true values:
    X/truth                 the true value. The error of the mean is the variance, so X/error must be a squared error.

Sums are over rollouts. A name X/PART adds to X too, with the mean true value of each part by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tinsmith.rl.types import Rollout

ERROR = "/error"
"""End of the name of a metric that is the error of a prediction."""
_NONE = 1e-6
"""A mean error below this is none: there is nothing to predict."""


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
        f"{part}/skill": 1.0 - errors[part] / total for part, total in baselines.items() if total > _NONE * counts[part]
    }


def _baseline(prediction: str, reported: Sequence[Mapping[str, float]]) -> float | None:
    """Sum of the errors of the trivial answer; None if the rollouts report neither baseline nor truth."""
    if all(f"{prediction}/baseline" in metrics for metrics in reported):
        return sum(metrics[f"{prediction}/baseline"] for metrics in reported)
    if all(f"{prediction}/truth" in metrics for metrics in reported):
        truths = np.array([metrics[f"{prediction}/truth"] for metrics in reported])
        return float(((truths - truths.mean()) ** 2).sum())
    return None
