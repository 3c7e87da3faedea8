"""The diagnosis of a run from its settings and the rows of its metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.rl.diagnosis import outcome, policy, signal
from tinsmith.rl.diagnosis.causes import by_cause
from tinsmith.rl.diagnosis.evidence import Evidence
from tinsmith.rl.diagnosis.findings import Diagnosis


def diagnose(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Diagnosis:
    """The findings of a run.

    `settings` are those of run.yaml, `rows` the lines of metrics.jsonl so far, in which training and evaluation of a
    step may be one row or two. Settings and metrics may be missing, and numbers may be NaN or null.

    Example: diagnose({"steps": 60}, read_metrics(Path("runs/demo"))).summary
    """
    evidence = Evidence(settings, rows)
    counts = signal.signal_of(evidence)
    findings = [*policy.findings(evidence), *signal.findings(evidence, counts), *outcome.findings(evidence)]
    return Diagnosis(
        steps=len(evidence.trained) or len(evidence.steps),
        updates=counts.updates if evidence.trained else None,
        missing={str(reason): count for reason, count in counts.missing.most_common()},
        findings=by_cause(findings),
    )
