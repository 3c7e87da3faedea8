"""Automatic back-off: less sampling ahead, and no updates on batches that are too far off-policy.

When the effective sample size or the divergence of an update leaves its bounds, the run is on guard: at most one batch
is sampled ahead, and each batch is measured by a forward pass before its update and skipped if it is out of bounds. It
ends after some batches in a row within bounds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pydantic import Field

from tinsmith.settings import Settings

log = logging.getLogger(__name__)

GUARDED_STALENESS = 1
"""Largest staleness on guard."""


class BackoffConfig(Settings):
    """Bounds of off-policy training. Beyond them, at most one batch is sampled ahead, and batches that are still out of
    bounds before their update are skipped."""

    ess_below: float = Field(default=0.3, ge=0, le=1)
    """Smallest effective sample size (optim/ess_tokens)."""
    kl_above: float = Field(default=0.05, gt=0)
    """Largest divergence between the policy that sampled and the one that trains (optim/kl_sample_train_k3), in nats
    per token."""
    recovery: int = Field(default=3, ge=1)
    """Batches in a row within the bounds after which the run goes on as before."""

    def fault(self, numbers: Mapping[str, float]) -> str:
        """What is out of bounds in the metrics of an update; empty if nothing is."""
        ess, kl = numbers.get("optim/ess_tokens", 1.0), numbers.get("optim/kl_sample_train_k3", 0.0)
        if ess < self.ess_below:
            return f"the effective sample size is {ess:.3g}, below {self.ess_below:g}"
        return "" if kl <= self.kl_above else f"the divergence is {kl:.3g} nats per token, above {self.kl_above:g}"


class Backoff:
    """Whether a run is on guard."""

    def __init__(self, config: BackoffConfig | None, state: Mapping[str, float]) -> None:
        """`state`: that of a checkpoint. Without `config`, a run is never on guard."""
        self._config = config
        self.guarded = config is not None and bool(state.get("guarded", 0.0))
        self._within_bounds = int(state.get("within_bounds", 0))

    @property
    def state(self) -> dict[str, float]:
        """State for a checkpoint."""
        return {"guarded": float(self.guarded), "within_bounds": float(self._within_bounds)} if self._config else {}

    def observe(self, step: int, numbers: Mapping[str, float]) -> bool:
        """Take the metrics of the batch of `step`, measured at its first update or before it; returns whether they are
        out of bounds."""
        if self._config is None:
            return False
        if fault := self._config.fault(numbers):
            consequence = "the step is skipped" if self.guarded else f"sampling {GUARDED_STALENESS} batch ahead at most"
            log.warning("Step %d: %s: %s", step, fault, consequence)
            self.guarded, self._within_bounds = True, 0
            return True
        self._within_bounds += self.guarded
        if self.guarded and self._within_bounds >= self._config.recovery:
            log.info("Step %d: within the bounds of backoff again", step)
            self.guarded, self._within_bounds = False, 0
        return False
