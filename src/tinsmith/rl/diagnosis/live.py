"""The diagnosis of a run in progress, which sees its rows one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.rl.diagnosis.diagnose import diagnose
from tinsmith.rl.diagnosis.findings import Diagnosis

_EACH = 10
"""Rows after each of which the run is diagnosed; from then on after every twentieth part of all rows."""
_NOT_READ = ("time/", "speed/", "workflow/", "env/", "shadow/", "buffer/")
"""Metrics that no rule reads; they are not kept, because a run may have thousands of steps."""


class LiveDiagnosis:
    """Diagnoses a run as its rows arrive.

    Example: changed = live.observe(3, {"reward/mean": 0.0, "optim/skipped": 1.0})
    """

    def __init__(self, settings: Mapping[str, Any], rows: Sequence[Mapping[str, float]] = ()) -> None:
        """`rows`: those of earlier processes of the run."""
        self._settings, self._rows = settings, [_read(row) for row in rows]
        self._due = 0
        self._names: frozenset[str] = frozenset()

    def observe(self, step: int, values: Mapping[str, float]) -> Diagnosis | None:
        """Take a row; returns the diagnosis if it has other findings than before."""
        self._rows.append({**_read(values), "step": step})
        if len(self._rows) < self._due and not any(name.startswith("eval/") for name in values):
            return None
        count = len(self._rows)
        self._due = count + (1 if count < _EACH else max(1, count // 20))
        result = self.result()
        names = frozenset(finding.name for finding in result.findings)
        before, self._names = self._names, names
        return result if names != before else None

    def result(self) -> Diagnosis:
        """The diagnosis of all rows so far."""
        return diagnose(self._settings, self._rows)


def _read(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith(_NOT_READ)}
