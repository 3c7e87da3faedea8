"""Preference losses: a score for each reply, and a loss of the scores of a chosen and a rejected one, or of each reply
with a label, without rewards.

Notation: log p is the sum of a reply's logprobs, log p_ref that of the reference, and mean log p the sum divided by the
number of tokens. All losses are means over pairs, or over replies; the aggregate is not used.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms.arrays import Array, library_of, sums_of_rows, without_gradient
from tinsmith.rl.algorithms.losses.base import Losses, PolicyLoss, SamplerRatio, Tokens
from tinsmith.rl.policy.chat import ANSWER, QUESTION

_LARGEST_LOGPROB = -1e-9
"""Bound of a logprob before its odds are computed, which are infinite at 0."""


class PreferenceLoss(PolicyLoss):
    """Base class of losses over pairs of replies: `scores` of the replies, and `losses` of the pairs."""

    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False
    reads_mismatched: ClassVar[bool] = False
    """Whether the loss reads replies after the prompts of other ones."""
    reads_labels: ClassVar[bool] = False
    """Whether the loss takes single replies with labels, too."""

    @property
    @override
    def sampler_ratio(self) -> SamplerRatio:
        return "none"

    def scores(self, logprobs: Array, batch: Tokens) -> Array:
        """The score of each row [rows]."""
        raise NotImplementedError

    def losses(self, chosen: Array, rejected: Array) -> Array:
        """The loss of each pair, from the scores of its replies."""
        raise NotImplementedError

    @override
    def total(self, logprobs: Array, batch: Tokens) -> Losses:
        """The loss and its metrics. Raises ConfigError if the batch has no pairs."""
        pairs = self.pairs_of(batch)
        scores = self.scores(logprobs, batch)
        chosen, rejected = scores[pairs[:, 0]], scores[pairs[:, 1]]
        return self.losses(chosen, rejected).mean(), _metrics(chosen, rejected)

    def pairs_of(self, batch: Tokens) -> Array:
        """The rows of the pairs [pairs, 2]. Raises ConfigError if the batch has none."""
        if batch.pairs is None:
            raise ConfigError(
                f"{type(self).model_fields['type'].default} trains on pairs of a chosen and a rejected reply, but the "
                "data has none.",
                "Set chosen and rejected on demonstrations.data.",
            )
        return batch.pairs


class DpoLoss(PreferenceLoss):
    """-(1 - s) log sigmoid(m) - s log sigmoid(-m), with the difference m of the scores beta (log p - log p_ref) and the
    label smoothing s: direct preference optimization (arXiv 2305.18290)."""

    type: Literal["dpo"] = "dpo"
    reads_reference: ClassVar[bool] = True
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference: the smaller, the further the policy may move away."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """s, the assumed probability that the labels of a pair are swapped."""

    @override
    def scores(self, logprobs: Array, batch: Tokens) -> Array:
        return self.beta * _log_ratios(logprobs, batch)

    @override
    def losses(self, chosen: Array, rejected: Array) -> Array:
        margin, smoothing = chosen - rejected, self.label_smoothing
        return (1 - smoothing) * _softplus(-margin) + smoothing * _softplus(margin)


class IpoLoss(PreferenceLoss):
    """(m - 1 / (2 tau))^2, with the difference m of the scores log p - log p_ref: identity preference optimization
    (arXiv 2310.12036). The margin of a pair is bounded, where that of dpo grows without end if all labels agree."""

    type: Literal["ipo"] = "ipo"
    reads_reference: ClassVar[bool] = True
    tau: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference: the margin of a pair is 1 / (2 tau) at the minimum."""

    @override
    def scores(self, logprobs: Array, batch: Tokens) -> Array:
        return _log_ratios(logprobs, batch)

    @override
    def losses(self, chosen: Array, rejected: Array) -> Array:
        return (chosen - rejected - 1 / (2 * self.tau)) ** 2


class SimpoLoss(PreferenceLoss):
    """-log sigmoid(m - gamma), with the difference m of the scores beta mean log p: no reference, and no preference for
    long replies (simple preference optimization, arXiv 2405.14734)."""

    type: Literal["simpo"] = "simpo"
    beta: float = Field(default=2.0, gt=0)
    """Scale of the scores."""
    gamma: float = Field(default=1.0, ge=0)
    """Margin that the score of the chosen reply should have."""

    @override
    def scores(self, logprobs: Array, batch: Tokens) -> Array:
        return self.beta * _mean_logprobs(logprobs, batch)

    @override
    def losses(self, chosen: Array, rejected: Array) -> Array:
        return _softplus(self.gamma - (chosen - rejected))


class OrpoLoss(PreferenceLoss):
    """-mean log p of the chosen reply - weight log sigmoid(m), with the difference m of the scores log(P / (1 - P)),
    log P = mean log p: fine-tuning and preference in one, without a reference (arXiv 2403.07691)."""

    type: Literal["orpo"] = "orpo"
    weight: float = Field(default=0.1, gt=0)
    """Weight of the preference against the likelihood of the chosen reply (lambda of the paper)."""

    @override
    def scores(self, logprobs: Array, batch: Tokens) -> Array:
        return log_odds(_mean_logprobs(logprobs, batch))

    @override
    def losses(self, chosen: Array, rejected: Array) -> Array:
        return self.weight * _softplus(-(chosen - rejected))

    @override
    def total(self, logprobs: Array, batch: Tokens) -> Losses:
        loss, metrics = super().total(logprobs, batch)
        likelihood = _mean_logprobs(logprobs, batch)[self.pairs_of(batch)[:, 0]]
        return loss - likelihood.mean(), {**metrics, "pairs/nll": -likelihood.mean()}


class KtoLoss(PreferenceLoss):
    """Mean over replies of w_d (1 - sigmoid(s - z)) for desirable and w_u (1 - sigmoid(z - s)) for undesirable ones,
    with the score s = beta (log p - log p_ref): the value of each reply by itself, as prospect theory has it
    (arXiv 2402.01306). Desirable are replies with the label true and the chosen ones of pairs.

    z is beta max(0, mean of log p - log p_ref) over the replies after other prompts of the step, without gradient, an
    estimate of the divergence from the reference. It costs a row for each reply, and two prompts a step.
    """

    type: Literal["kto"] = "kto"
    reads_reference: ClassVar[bool] = True
    reads_mismatched: ClassVar[bool] = True
    reads_labels: ClassVar[bool] = True
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """w_d, the weight of desirable replies. With n desirable and m undesirable ones in the data, w_d n should be 1 to
    4/3 times w_u m."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """w_u, the weight of undesirable replies."""

    @override
    def total(self, logprobs: Array, batch: Tokens) -> Losses:
        good, bad = _labelled(batch)
        if batch.mismatched is None:
            raise ValueError("kto reads replies after the prompts of other ones")
        scores = self.beta * _log_ratios(logprobs, batch)
        z = library_of(scores).clip(without_gradient(scores[batch.mismatched].mean()), 0.0, None)
        # 1 - sigmoid(x) = sigmoid(-x)
        desirable = self.desirable_weight * _sigmoid(z - scores[good])
        undesirable = self.undesirable_weight * _sigmoid(scores[bad] - z)
        loss = (desirable.sum() + undesirable.sum()) / (len(good) + len(bad))
        if batch.desirable is None:
            return loss, {**_metrics(scores[good], scores[bad]), "pairs/divergence": z}
        right = ((scores[good] > z) * 1.0).sum() + ((scores[bad] < z) * 1.0).sum()
        metrics = {"labels/accuracy": right / (len(good) + len(bad)), "labels/divergence": z}
        for name, rows in (("desirable", good), ("undesirable", bad)):
            if len(rows):
                metrics[f"labels/{name}"] = scores[rows].mean()
        return loss, metrics


def _labelled(batch: Tokens) -> tuple[Array, Array]:
    """The rows of good and of bad replies. Raises ConfigError if there are neither pairs nor labels."""
    parts = [] if batch.pairs is None else [(batch.pairs[:, 0], batch.pairs[:, 1])]
    if batch.desirable is not None and batch.undesirable is not None:
        parts.append((batch.desirable, batch.undesirable))
    if not parts:
        raise ConfigError(
            "kto trains on replies with labels, or on pairs of a chosen and a rejected one, but the data has neither.",
            "Set label_key, or chosen and rejected, on demonstrations.data.",
        )
    good, bad = zip(*parts, strict=True)
    library = library_of(good[0])
    return library.concatenate(good), library.concatenate(bad)


class BradleyTerryLoss(PreferenceLoss):
    """-log sigmoid(c - r) + center (c + r)^2, with the scores c, r = log(P / (1 - P)), where P is the probability that
    the model answers `answer` to `question` after the reply: a reward model, whose score is the log-odds of one token
    (the model of Bradley and Terry, as in arXiv 2203.02155). The reward `reward_model` reads it.
    """

    type: Literal["bradley_terry"] = "bradley_terry"
    question: str = Field(default=QUESTION, min_length=1)
    """Question after the reply, as a message of the user."""
    answer: str = Field(default=ANSWER, min_length=1)
    """Answer whose first token is scored."""
    center: float = Field(default=0.01, ge=0)
    """Weight of the term that keeps the mean of scores at 0, which drifts otherwise (arXiv 2312.09244)."""

    @override
    def scores(self, logprobs: Array, batch: Tokens) -> Array:
        return log_odds(sums_of_rows(logprobs, batch.sequence, int(batch.sequence[-1]) + 1))

    @override
    def losses(self, chosen: Array, rejected: Array) -> Array:
        return _softplus(-(chosen - rejected)) + self.center * (chosen + rejected) ** 2


def log_odds(logprobs: Array) -> Array:
    """log(P / (1 - P)) for log P."""
    library = library_of(logprobs)
    bounded = library.clip(logprobs, None, _LARGEST_LOGPROB)
    return bounded - library.log(-library.expm1(bounded))


def _metrics(chosen: Array, rejected: Array) -> dict[str, Array]:
    margin = chosen - rejected
    return {
        "pairs/accuracy": ((margin > 0) * 1.0).mean(),
        "pairs/margin": margin.mean(),
        "pairs/chosen": chosen.mean(),
        "pairs/rejected": rejected.mean(),
    }


def _log_ratios(logprobs: Array, batch: Tokens) -> Array:
    """log p - log p_ref of each row."""
    if batch.reference is None:
        raise ValueError("the loss reads logprobs of the reference")
    return sums_of_rows(logprobs - batch.reference, batch.sequence, int(batch.sequence[-1]) + 1)


def _mean_logprobs(logprobs: Array, batch: Tokens) -> Array:
    rows, ones = int(batch.sequence[-1]) + 1, library_of(logprobs).ones_like(logprobs)
    return sums_of_rows(logprobs, batch.sequence, rows) / sums_of_rows(ones, batch.sequence, rows)


def _softplus(values: Array) -> Array:
    """-log sigmoid(-x) = log(1 + e^x)."""
    library = library_of(values)
    return library.logaddexp(library.zeros_like(values), values)


def _sigmoid(values: Array) -> Array:
    return library_of(values).exp(-_softplus(-values))
