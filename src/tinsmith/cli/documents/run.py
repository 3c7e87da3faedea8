"""What JSON says of a run: `tinsmith show RUN --json` and `tinsmith run FILE --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.diagnosis import Finding
    from tinsmith.rl.history import RunHistory


def run_document(history: RunHistory) -> dict[str, Any]:
    """The state, the result and the metrics of a run, and those of its stages."""
    from tinsmith.rl.diagnosis import diagnose

    status, metrics = history.status, history.metrics
    diagnosis = diagnose(history.settings, metrics.rows)
    return {
        "name": history.name,
        "folder": str(history.path),
        "state": status.condition,
        "reason": status.reason,
        "step": status.step,
        "steps": history.step_count,
        "updates": diagnosis.updates,
        "summary": diagnosis.summary,
        "findings": [_finding(each) for each in diagnosis.findings],
        "checkpoint": _checkpoint(history),
        "comparison": history.comparison,
        "results": history.results,
        "metrics": metrics.columns(),
        "stages": [run_document(stage) for stage in history.stages],
        "parts": list(history.parts),
    }


def document_of(settings: RunConfig) -> dict[str, Any]:
    """The document of the run with these settings; in mode explore or bench, of that part of it."""
    from tinsmith.rl.history import RunHistory
    from tinsmith.rl.record.layout import BENCH, explore_part
    from tinsmith.rl.run.parts import folder_path

    path = folder_path(settings)
    part = {"explore": explore_part(settings.sampler), "bench": BENCH}.get(settings.mode, "")
    return run_document(RunHistory(path / part, part) if part else RunHistory(path))


def _finding(finding: Finding) -> dict[str, Any]:
    """A finding with its change in words, and the setting and the value of it."""
    change = finding.change
    return {**asdict(finding), "change": change.text, "setting": change.setting, "value": change.value}


def _checkpoint(history: RunHistory) -> dict[str, Any] | None:
    """The result of the run (`find_checkpoint`); None before the first checkpoint."""
    from tinsmith.rl.history import find_checkpoint

    try:
        saved = find_checkpoint(history)
    except ConfigError:
        return None
    return {"step": saved.step, "weights": saved.sampling_path, "state": saved.path}
