"""Results of a check as a file in benchmarks/results/gpu, and its comparison with the last one of the same card."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.step import Outcome

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
CHANGED = 0.1
"""Relative difference from which a value is listed as changed."""


def save(outcomes: Sequence[Outcome], folder: Path = RESULTS) -> Path:
    """Write the outcomes to CARD-DATE.json; steps of an earlier run on that day stay where these lack them."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{_card(outcomes)}-{time.strftime('%Y-%m-%d')}.json"
    steps = read(file) | {str(outcome.step): outcome.to_json() for outcome in outcomes}
    ordered = {number: steps[number] for number in sorted(steps, key=int)}
    file.write_text(json.dumps(ordered, indent=1) + "\n")
    return file


def read(file: Path) -> dict[str, Any]:
    """The outcomes of a results file by step number; empty if there is none."""
    return json.loads(file.read_text()) if file.is_file() else {}


def last_before(file: Path) -> Path | None:
    """The newest earlier results file of the same card."""
    card = file.stem[: -len("-2026-01-01")]
    earlier = (other for other in sorted(file.parent.glob(f"{card}-*.json")) if other.name < file.name)
    return max(earlier, default=None)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterable[str]:
    """A line for each number that differs by more than CHANGED."""
    for step in after.keys() & before.keys():
        old, new = before[step]["values"], after[step]["values"]
        for name in sorted(old.keys() & new.keys()):
            if _is_number(old[name]) and _is_number(new[name]) and _differs(old[name], new[name]):
                yield f"step {step}, {name}: {old[name]:.4g} -> {new[name]:.4g}"


def _card(outcomes: Sequence[Outcome]) -> str:
    """The card's name as a part of a file name, from step 0."""
    name = next((str(outcome.values["card"]) for outcome in outcomes if "card" in outcome.values), "unknown")
    return re.sub(r"\W+", "-", name.removeprefix("NVIDIA ")).strip("-").lower()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _differs(old: float, new: float) -> bool:
    return abs(new - old) > CHANGED * max(abs(old), abs(new))
