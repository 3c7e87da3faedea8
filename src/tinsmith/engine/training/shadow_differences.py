"""First-order virtual SGD steps by forward passes only.

The change of a probe by an SGD step on a text is lr <g_text, g_probe>, which is also lr times the derivative of the
text's sum w p along the probe's gradient g_probe. So for each distinct probe, the texts are scored at two ends,
start - d g_probe and start + d g_probe, and

    delta = lr (S(+) - S(-)) / 2d        S = sum w p of the text; the error is quadratic in d

Texts that are scored with the same weights share the computation of their prefixes, which gradients of single texts
cannot. The texts are also scored at the start, because that is part of the result.

The distance d is right if logprobs change by an amount well above the rounding of float32 (about 4e-5 in SmolLM2), and
so small that the cubic term does not count; that is checked, and d corrected. With a bfloat16 base, differences are
mostly rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tinsmith.engine.base import Datum
from tinsmith.engine.model.packing import PackedRow, packed_tokens
from tinsmith.engine.training.shadow_plan import ShadowPlan, ShadowSettings, weighted_sum

LEAST_CHANGE, AIM, MOST_CHANGE = 0.01, 0.04, 0.08
"""Largest change of a logprob from the middle to an end, in nats."""
FIRST_AIM = 0.2
"""Change that the first distance would cause in a text whose gradient is that of the probe; others are at an angle."""
ATTEMPTS = 3
MAX_CORRECTION = 1e3
"""Of a distance, in one attempt."""
BACKWARD_COST = 2
"""Cost of a token forward and backward, relative to forward: the base's weights have no gradient."""


def pays_off(settings: ShadowSettings, plan: ShadowPlan) -> bool:
    """Whether forward passes are possible and cheaper than a backward pass for each step."""
    if settings.optimizer != "sgd":
        return False
    steps, probes = range(len(plan.steps)), range(len(plan.probes))
    start = _tokens(plan, ((0, number) for number in steps))
    ends = 2 * _tokens(plan, ((probe, number) for probe in probes for number in plan.steps_with(probe)))
    return start + ends < BACKWARD_COST * _tokens(plan, ((number, number) for number in steps))


def first_distances(probes: Sequence[Datum], norms: Sequence[float]) -> list[float]:
    """Distances at which tokens are expected to change by about AIM; `norms` are those of the probes' gradients.

    The largest gradient of a probe per token stands for that of a token to score.
    """
    weights = [float(np.abs(probe.inputs["weights"]).sum(dtype=np.float64)) for probe in probes]
    of_token = max((norm / weight for norm, weight in zip(norms, weights, strict=True) if weight > 0), default=0.0)
    return [FIRST_AIM / (of_token * norm) if of_token * norm > 0 else 0.0 for norm in norms]


class Difference:
    """The logprobs of the train data of some steps at both ends."""

    def __init__(
        self, plan: ShadowPlan, steps: Sequence[int], low: Sequence[np.ndarray], high: Sequence[np.ndarray]
    ) -> None:
        self._plan, self._steps = plan, steps
        self._low, self._high = low, high

    @property
    def accurate(self) -> bool:
        return LEAST_CHANGE <= self._largest() <= MOST_CHANGE

    @property
    def correction(self) -> float:
        """Factor of the distance at which the largest change will be about AIM."""
        return float(np.clip(AIM / max(self._largest(), 1e-30), 1 / MAX_CORRECTION, MAX_CORRECTION))

    def changes(self, factor: float) -> dict[int, float]:
        """`factor` times the derivative, by step."""
        halves = iter([(high.astype(np.float64) - low) / 2 for low, high in zip(self._low, self._high, strict=True)])
        return {
            number: factor * sum(weighted_sum(datum, next(halves)) for datum in self._plan.steps[number].train)
            for number in self._steps
        }

    def _largest(self) -> float:
        """The largest change of a logprob that counts, from the middle to an end."""
        data = [datum for number in self._steps for datum in self._plan.steps[number].train]
        return max(
            float(np.abs(high - low).max(initial=0, where=datum.inputs["weights"] != 0)) / 2
            for datum, low, high in zip(data, self._low, self._high, strict=True)
        )


def _tokens(plan: ShadowPlan, pairs: Iterable[tuple[int, int]]) -> int:
    """Tokens to compute for pairs of an adapter and a step, each shared prefix of an adapter once."""
    rows = [(adapter, datum) for adapter, number in pairs for datum in plan.steps[number].train]
    return packed_tokens(
        PackedRow(key=key, adapter=adapter, tokens=datum.tokens, images=datum.images)
        for key, (adapter, datum) in enumerate(rows)
    )
