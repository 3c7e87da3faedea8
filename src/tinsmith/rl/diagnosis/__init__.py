"""The diagnosis of a run: what its metrics say about whether it learns, each finding with its numbers and one change.

`diagnose` is a pure function of the settings and the rows of metrics.jsonl. Console, report, trackers, `tinsmith show`
and the dashboard show what it returns.
"""

from tinsmith.rl.diagnosis.diagnose import diagnose
from tinsmith.rl.diagnosis.findings import Change, Diagnosis, Finding, Severity
from tinsmith.rl.diagnosis.live import LiveDiagnosis
from tinsmith.rl.diagnosis.outcome import first_batch

__all__ = ["Change", "Diagnosis", "Finding", "LiveDiagnosis", "Severity", "diagnose", "first_batch"]
