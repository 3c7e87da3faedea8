"""The diagnosis of a run from its settings and the rows of its metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.rl.diagnosis import outcome, policy, signal, thresholds
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
    of_policy = [*policy.findings(evidence)]
    names = {finding.name for finding in of_policy}
    damaged = bool(names & policy.DAMAGES)
    hidden = {"entropy_collapse", "learning_rate_high"} if damaged else set[str]()
    too_fast = "learning_rate_high" in names and counts.updates < thresholds.UPDATED.value * len(evidence.trained)
    findings = [
        *(finding for finding in of_policy if finding.name not in hidden),
        *signal.findings(evidence, counts, damaged=damaged or too_fast),
        *outcome.findings(evidence, damaged=damaged or too_fast),
    ]
    if any(finding.name == "no_update" for finding in findings):
        findings = [each for each in findings if each.name != "below_constant"]
    if len(findings) > 1:  # the others say why
        findings = [each for each in findings if each.name != "reward_flat"]
    return Diagnosis(
        steps=len(evidence.trained) or len(evidence.steps),
        updates=counts.updates if evidence.trained else None,
        missing={str(reason): count for reason, count in counts.missing.most_common()},
        findings=tuple(sorted(findings, key=lambda finding: finding.severity)),  # error before warning
    )
