"""One finding for each cause: what a finding explains is not said again, and a setting is changed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tinsmith.rl.diagnosis.findings import Finding

_OUTCOMES = ("below_constant", "reward_flat")
"""What came of a run: every other finding explains it."""
_SAID = ("held_out_flat",)
"""Warnings whose numbers a cause says, as it does those of errors."""


def by_cause(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings that no other explains, errors first.

    A cause says each error that it explains in a further sentence; most warnings are left out. Findings that change the
    same setting are one, with the change of the first.
    """
    roots = {finding.name: _root(finding, findings) for finding in findings}
    causes = [_joined(each, [other for other in findings if roots[other.name] is each]) for each in roots.values()]
    listed: dict[str, Finding] = {}
    for cause in sorted(dict.fromkeys(causes), key=lambda finding: finding.severity):  # error before warning
        key = cause.change.setting or cause.change.text
        listed[key] = _joined(listed[key], [cause], whole=True) if key in listed else cause
    return tuple(listed.values())


def _root(finding: Finding, findings: Sequence[Finding]) -> Finding:
    """The finding that explains `finding`, or what explains that one."""
    root = finding
    for _ in findings:
        cause = next((each for each in findings if _explains(each, root)), None)
        if cause is None:
            break
        root = cause
    return root


def _explains(cause: Finding, finding: Finding) -> bool:
    is_outcome = finding.name in _OUTCOMES and cause.name not in _OUTCOMES
    return is_outcome or finding.name in cause.explains


def _joined(cause: Finding, explained: Sequence[Finding], *, whole: bool = False) -> Finding:
    """The cause with the sentences of the errors that it explains; with `whole`, of the warnings too."""
    others = [each for each in explained if each is not cause]
    said = [each.sentence for each in others if whole or each.severity == "error" or each.name in _SAID]
    return replace(
        cause,
        severity=min([cause.severity, *(each.severity for each in others)]),
        sentence=" ".join([cause.sentence, *said]),
        explains=(
            *(cause.explains if whole else ()),
            *(name for each in others for name in (each.name, *(each.explains if whole else ()))),
        ),
    )
