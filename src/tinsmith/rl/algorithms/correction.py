"""Corrections for tokens that other weights, or another implementation, sampled than those in training.

With q the sampler's logprob of a token and o that of the trainer before the first update of the batch, the weight of
the token is a bounded exp(o - q), without gradient. The policy loss is multiplied by it, and its importance ratios are
relative to o (decoupled PPO, arXiv 2110.00641 and 2505.24298). With one update for each batch, o is the trainer's
logprob p itself: the ratios are 1 in value, and losses that only bound the ratio all have the gradient
-weight A grad p.

A mask ignores tokens, or whole rows, whose ratio to the sampler is outside its bounds. Without a weight, the ratio is
that of the weights in training, exp(p - q), and the loss keeps its own ratio to the sampler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tinsmith.rl.algorithms.arrays import Array, at_least_one, library_of, sums_of_rows, without_gradient
from tinsmith.rl.algorithms.losses.base import LOG_RATIO_LIMIT, Tokens, token_fraction
from tinsmith.settings import Needs, Settings

_WEIGHTED = ("tis", "mis")
_MASK_BOUNDS = {"token": (0.5, 2.0), "sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}


class CorrectionConfig(Settings):
    """Importance weights and masks against the difference between the sampling policy and the trained one."""

    type: Literal["none", "proximal", "tis", "mis"] = "none"
    """`none` uses the ratio of the loss to the sampler alone. The others use a ratio to the trainer's logprobs before
    the first update of the batch, with a weight for the sampler: 1 (`proximal`), exp(o - q) truncated at `cap`
    (`tis`, truncated importance sampling), or 0 where it is not between `floor` and `cap` (`mis`, masked importance
    sampling, IcePop)."""
    level: Annotated[Literal["token", "sequence"], Needs("type", _WEIGHTED)] = "token"
    """One weight for each token, or the product of all tokens of a row (`sequence`)."""
    cap: Annotated[float, Needs("type", _WEIGHTED)] = Field(default=2.0, gt=0)
    """Largest weight."""
    floor: Annotated[float, Needs("type", ("mis",))] = Field(default=0.0, ge=0)
    """Smallest weight that is not ignored."""
    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """`token` ignores tokens that have moved too far where the advantage pushes them: with a ratio above `mask_high`
    and A > 0, or below `mask_low` and A < 0. `sequence` ignores rows whose product of ratios is outside the bounds,
    `geometric` those whose geometric mean of ratios is."""
    mask_low: Annotated[float | None, Needs("mask")] = Field(default=None, ge=0, lt=1)
    """Lower bound; not set: 0.5, or 0.99 with `geometric`."""
    mask_high: Annotated[float | None, Needs("mask")] = Field(default=None, gt=1)
    """Upper bound; not set: 2, or 1.01 with `geometric`."""

    @model_validator(mode="after")
    def _check_bounds(self) -> CorrectionConfig:
        if self.floor > self.cap:
            raise ValueError(f"floor {self.floor:g} is above cap {self.cap:g}")
        return self

    @property
    def enabled(self) -> bool:
        """Whether losses are weighted, and their ratios are relative to the trainer."""
        return self.type != "none"

    @property
    def changes_loss(self) -> bool:
        """Whether there are weights or a mask."""
        return self.enabled or self.mask != "none"

    @property
    def mask_bounds(self) -> tuple[float, float]:
        """Bounds of the mask."""
        low, high = _MASK_BOUNDS.get(self.mask, (0.0, float("inf")))
        return (low if self.mask_low is None else self.mask_low, high if self.mask_high is None else self.mask_high)

    def corrected(self, logprobs: Array, batch: Tokens) -> tuple[Tokens, dict[str, Array]]:
        """The batch with weighted tokens, whose importance ratios are relative to the trainer if there are weights, and
        metrics."""
        library = library_of(logprobs)
        anchor = without_gradient(logprobs) if batch.proximal is None or not self.enabled else batch.proximal
        difference = anchor - batch.old
        ratio = _exp(_row_sums(difference, batch) if self.level == "sequence" else difference)
        weight = self._bounded(ratio)
        bounded = (weight != ratio) & ~batch.expert if self.type in _WEIGHTED else library.zeros_like(batch.expert)
        weight = library.where(self._masked(difference, batch), library.zeros_like(weight), weight)
        weight = library.where(batch.expert, library.ones_like(weight), weight)
        policy = batch.counts * ~batch.expert
        metrics = {"correction/masked": _share((weight == 0) & ~batch.expert, policy)}
        if self.type in _WEIGHTED:
            metrics["correction/weight"] = (weight * policy).sum() / at_least_one(policy.sum())
            metrics["correction/bounded"] = token_fraction(bounded, batch)
        scaled = {"weights": batch.weights * weight, "policy_weights": batch.policy_weights * weight}
        old = library.where(batch.expert, batch.old, anchor) if self.enabled else batch.old
        return replace(batch, old=old, **scaled), metrics

    def _bounded(self, ratio: Array) -> Array:
        library = library_of(ratio)
        match self.type:
            case "tis":
                return library.clip(ratio, None, self.cap)
            case "mis":
                return library.where((ratio >= self.floor) & (ratio <= self.cap), ratio, library.zeros_like(ratio))
            case _:
                return library.ones_like(ratio)

    def _masked(self, difference: Array, batch: Tokens) -> Array:
        """bool [T]: whether the mask ignores the token."""
        library, (low, high) = library_of(difference), self.mask_bounds
        match self.mask:
            case "token":
                ratio = _exp(difference)
                return library.where(batch.advantages > 0, ratio > high, (ratio < low) & (batch.advantages < 0))
            case "sequence":
                ratio = _exp(_row_sums(difference, batch))
            case "geometric":
                ratio = _exp(batch.row_mean(difference))
            case _:
                return library.zeros_like(batch.expert)
        return (ratio < low) | (ratio > high)


def _exp(difference: Array) -> Array:
    library = library_of(difference)
    return library.exp(library.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _row_sums(values: Array, batch: Tokens) -> Array:
    """[T]: the sum of `values` over the row of each token."""
    return sums_of_rows(values, batch.sequence, int(batch.sequence[-1]) + 1)[batch.sequence]


def _share(condition: Array, counts: Array) -> Array:
    return (condition * counts).sum() / at_least_one(counts.sum())
