"""How a layer's attention computes its scores, beside which keys a query sees."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Constants of one layer's attention."""

    scale: float
    """Factor of the scores q k."""
    window: int | None = None
    """A query sees the last `window` tokens of its row, itself included; None: all earlier tokens."""
    softcap: float | None = None
    """Scores become c tanh(score / c)."""
    sinks: Tensor | None = None
    """[Hq]: a logit for each head that takes part in the softmax and has no value."""

    @property
    def is_softmax(self) -> bool:
        """Whether the probabilities are the softmax of the scores, as compiled functions compute them."""
        return self.softcap is None and self.sinks is None

    @property
    def is_plain(self) -> bool:
        """Whether the rule is a scale alone."""
        return self.window is None and self.is_softmax
