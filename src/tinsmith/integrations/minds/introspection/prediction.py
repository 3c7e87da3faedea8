"""Scores of a prediction of what a step of training changes.

    absolute     max(0, 1 - |prediction - delta|)
    normalised   1 / (1 + (prediction - z)^2), with z = (delta - mean) / std of the probe's earlier effects
    sign         1 if the prediction has the sign of delta
    rank         (1 + Spearman's correlation) / 2 of the predicted order of the probes with the order of their effects

Each has an error, and the errors of two trivial predictions: no change (`zero`) and the probe's mean change so far
(`probe_mean`). Skill scores compare with them (rl/record/metrics.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tinsmith.integrations.minds.introspection.beliefs import rank_correlation, spearman
from tinsmith.integrations.minds.introspection.parsing import number
from tinsmith.integrations.minds.shadow.statistics import Moments
from tinsmith.rl.scoring.replies import after_thoughts

Scoring = Literal["absolute", "normalised", "sign", "rank"]
Prediction = float | tuple[int, ...]
"""A number, or the order of the probes: indices from the largest to the smallest change."""

_PREDICTION = re.compile(r"^[ \t]*PREDICTION[ \t]*:[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_ANSWER = re.compile(r"^[ \t]*ANSWER[ \t]*:", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The parts of a reply; None for a part that is missing or has another form.

    Example: parse("PREDICTION: -0.5\\nANSWER: 12", "absolute", 1) == Parsed(prediction=-0.5, answer="12")
    """

    prediction: Prediction | None
    answer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionScore:
    """The score of a prediction, its error, and the errors of trivial predictions.

    Example: PredictionScore(score=0.9, error=0.1, zero=0.3, probe_mean=0.2)
    """

    score: float
    error: float
    zero: float
    probe_mean: float

    @property
    def metrics(self) -> dict[str, float]:
        """Errors and baselines by the names of rl/record/metrics.py."""
        return {
            "over_zero/error": self.error,
            "over_zero/baseline": self.zero,
            "over_probe_mean/error": self.error,
            "over_probe_mean/baseline": self.probe_mean,
        }


def parse(text: str, scoring: Scoring, probes: int) -> Parsed:
    """The prediction of the last PREDICTION line before the last ANSWER line, and all that follows ANSWER."""
    text = after_thoughts(text)
    answers = list(_ANSWER.finditer(text))
    lines = _PREDICTION.findall(text[: answers[-1].start()] if answers else text)
    prediction = _prediction(lines[-1], scoring, probes) if lines else None
    return Parsed(prediction=prediction, answer=text[answers[-1].end() :].strip() or None if answers else None)


def _prediction(text: str, scoring: Scoring, probes: int) -> Prediction | None:
    if scoring == "rank":
        items = [number(item) for item in text.split(",")]
        ranks = [item for item in items if item is not None]
        fits = len(items) == len(ranks) and sorted(ranks) == list(range(1, probes + 1))
        return tuple(int(rank) - 1 for rank in ranks) if fits else None
    if scoring == "sign":
        value = {"+": 1.0, "-": -1.0, "−": -1.0}.get(text) or number(text)
        return value or None
    return number(text)


def score(
    prediction: Prediction, deltas: Sequence[float], moments: Sequence[Moments], scoring: Scoring
) -> PredictionScore:
    """Score a prediction for the effects on its probes; all but `rank` have one probe."""
    if scoring == "rank":
        assert isinstance(prediction, tuple)
        error = (1 - spearman(prediction, deltas)) / 2
        mean_error = (1 - rank_correlation([each.mean for each in moments], deltas)) / 2
        return PredictionScore(score=1 - error, error=error, zero=0.5, probe_mean=mean_error)
    assert isinstance(prediction, float)
    delta, moment = deltas[0], moments[0]
    if scoring == "absolute":
        errors = [abs(value - delta) for value in (prediction, 0.0, moment.mean)]
        return PredictionScore(score=max(0.0, 1 - errors[0]), error=errors[0], zero=errors[1], probe_mean=errors[2])
    if scoring == "normalised":
        z = moment.z(delta)
        errors = [(value - z) ** 2 for value in (prediction, moment.z(0.0), 0.0)]
        return PredictionScore(score=1 / (1 + errors[0]), error=errors[0], zero=errors[1], probe_mean=errors[2])
    errors = [(1 - np.sign(value) * np.sign(delta)) / 2 for value in (prediction, 0.0, moment.mean)]
    return PredictionScore(score=1 - errors[0], error=errors[0], zero=errors[1], probe_mean=errors[2])
