"""Records of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tinsmith.plurals import counted

Severity = Literal["error", "warning"]
"""`error`: the run learns nothing, or what it has learned is of no use; `warning`: it could learn better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What to do about a finding: a setting of the run file with its new value, other advice, or both.

    Example: Change(setting="sampling.max_tokens", value=256).text
    """

    setting: str = ""
    """Key of the run file that is changed; empty if it is not a single one."""
    value: float | str | None = None
    """Its new value; None if the settings do not say the present one, and `advice` says in which direction."""
    advice: str = ""
    """Sentences on what else to do."""

    @property
    def text(self) -> str:
        """The change in sentences."""
        if self.value is None:
            return self.advice
        value = f"{self.value:g}" if isinstance(self.value, float) else self.value
        return f"Set {self.setting}: {value}. {self.advice}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that keeps a run from learning.

    Example: Finding(name="cut_off", severity="warning", sentence="62 % of the replies …",
    change=Change(setting="sampling.max_tokens", value=256), metric="rollouts/cut")
    """

    name: str
    """Name of the rule, such as no_update; docs/not-learning.md lists all."""
    severity: Severity
    sentence: str
    """What is wrong, with its numbers."""
    change: Change
    """What to do about it."""
    metric: str = ""
    """The metric that shows it best."""
    explains: tuple[str, ...] = ()
    """Names of findings that have the same cause and are not listed."""

    @property
    def text(self) -> str:
        """The sentence and the change."""
        return f"{self.sentence} {self.change.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the rows of a run say. A healthy run has no findings."""

    steps: int = 0
    """Steps with a row."""
    updates: int | None = None
    """Steps of these that updated the weights; None if the rows do not say so."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """Steps without an update by their reason, the most frequent first."""
    findings: tuple[Finding, ...] = ()
    """Errors first."""

    @property
    def trained_nothing(self) -> bool:
        """Whether there were steps and none of them updated the weights."""
        return bool(self.steps) and self.updates == 0

    @property
    def summary(self) -> str:
        """How many steps updated the weights, and why the others did not; empty without steps that train."""
        if not self.steps or self.updates is None:
            return ""
        if self.updates == self.steps:
            return f"all {counted(self.steps, 'step')} updated the weights" if self.steps > 1 else "1 step, 1 update"
        if not self.missing:
            return f"{self.updates} of {counted(self.steps, 'step')} updated the weights"
        reasons = ", ".join(f"{reason} in {count}" for reason, count in self.missing.items())
        return f"{self.updates or 'none'} of {counted(self.steps, 'step')} updated the weights: {reasons}"

    @property
    def text(self) -> str:
        """The summary and the findings, a line each; for trackers."""
        findings = [f"{each.severity}: {each.text}" for each in self.findings] or ["No findings."]
        return "\n".join([*([f"{self.summary}."] if self.summary else []), *findings])
