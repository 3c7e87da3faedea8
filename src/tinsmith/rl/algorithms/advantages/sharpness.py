"""GRPO's advantages kept only where they do not push the entropy down too fast.

A token of negative advantage is left out where its own surprise stands out of the step's: the policy would lose spread
there.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tinsmith.rl.algorithms.advantages.base import Advantage, Advantages, Traces
from tinsmith.rl.algorithms.advantages.group import Grpo


class ClipB(Advantage):
    """S = p (H + log p): keep A > 0, and A < 0 where S - mean(S) >= -mu std(S)."""

    type: Literal["clipb"] = "clipb"
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    mu: float = Field(default=2.5, ge=0)
    """How many deviations below the mean are kept."""
    normalize: Literal["none", "group", "batch"] = "group"
    """As of grpo."""

    def of(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Mean and deviation are over all tokens of the step."""
        plain = Grpo(normalize=self.normalize).of(traces_PG, random)
        signals = [
            [np.exp(trace.logprobs) * (trace.columns["entropy"] + trace.logprobs) for trace in traces_G]
            for traces_G in traces_PG
        ]
        every = np.concatenate([np.zeros(0), *(signal for signals_G in signals for signal in signals_G)])
        floor = float(every.mean() - self.mu * every.std()) if len(every) else 0.0
        return [
            [
                np.where((values > 0) | (signal >= floor), values, 0.0)
                for values, signal in zip(values_G, signals_G, strict=True)
            ]
            for values_G, signals_G in zip(plain, signals, strict=True)
        ]
