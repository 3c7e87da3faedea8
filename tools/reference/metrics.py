"""The names that Trinity-RFT has for metrics of a run."""

from __future__ import annotations

from tinsmith.integrations.trinity.metric_names import TRINITY


def trinity_names() -> str:
    """Our name of a metric and Trinity-RFT's."""
    rows = (f"| `{ours}` | `{theirs}` |" for ours, theirs in TRINITY.items())
    return "\n".join(["| metric | in Trinity-RFT |", "| --- | --- |", *rows])
