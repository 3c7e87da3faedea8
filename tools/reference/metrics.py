"""Metrics of a run: the names that Trinity-RFT has for them, and the bounds of its diagnosis."""

from __future__ import annotations

from tinsmith.integrations.trinity.metric_names import TRINITY
from tinsmith.rl.diagnosis import thresholds


def trinity_names() -> str:
    """Our name of a metric and Trinity-RFT's."""
    rows = (f"| `{ours}` | `{theirs}` |" for ours, theirs in TRINITY.items())
    return "\n".join(["| metric | in Trinity-RFT |", "| --- | --- |", *rows])


def diagnosis_bounds() -> str:
    """The bounds of the rules that diagnose a run."""
    bounds = [bound for bound in vars(thresholds).values() if isinstance(bound, thresholds.Threshold)]
    return "\n".join(
        ["| bound | of what, and why |", "| --- | --- |", *(f"| {b.value:g} | {b.reason} |" for b in bounds)]
    )
