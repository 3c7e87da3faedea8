"""Numbers as the sentences of findings write them, and changes that several findings share."""

from __future__ import annotations

import math

from tinsmith.rl.diagnosis import thresholds
from tinsmith.rl.diagnosis.evidence import Evidence
from tinsmith.rl.diagnosis.findings import Change
from tinsmith.settings import flatten

RATE = "optimizer.learning_rate"


def percent(share: float) -> str:
    """A share in percent: 62 %."""
    return f"{100 * share:.0f} %"


def number(value: float) -> str:
    """Three digits: 0.312, 1.2e-05, 1,234."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def rounded(value: float) -> float:
    """A setting near the value, with one digit: 5e-05, 0.3."""
    return round(value, -math.floor(math.log10(value))) if value > 0 else 0.0


def up(value: float) -> int:
    """The power of two from the value on, as sizes are set."""
    return 2 ** max(0, math.ceil(math.log2(max(1.0, value))))


def more_turns(evidence: Evidence) -> Change:
    """The change to the largest number of turns, of the workflow or of an environment."""
    path = next((path for path in flatten(evidence.settings) if path.rpartition(".")[2] == "max_turns"), "")
    limit = evidence.number(path) if path else 0.0
    if not limit:
        return Change(setting="workflow.max_turns", advice="Raise workflow.max_turns.")
    return Change(setting=path, value=round(2 * limit))


def lower_rate(evidence: Evidence, factor: float, then: str = "") -> Change:
    """The change to a learning rate that is smaller by `factor`, and what to do `then`."""
    rate = max([evidence.number(RATE), *evidence.curve("optim/lr")])
    lower = thresholds.RATE_USUAL.value if rate > thresholds.RATE_HIGH.value else rate / factor
    if not rate:
        return Change(setting=RATE, advice=f"Lower {RATE}. {then}".rstrip())
    return Change(setting=RATE, value=rounded(lower), advice=then)
