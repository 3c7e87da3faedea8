"""Small runs give what was recorded: metrics, rollouts and weights. To record again: `python -m tests.recorded`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.recorded.runs import CASES, record


def close(values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Lists of numbers to compare with: differences of nearly equal numbers vary between machines."""
    return {
        name: [number if number is None else pytest.approx(number, rel=1e-4, abs=1e-6) for number in numbers]
        for name, numbers in values.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_run_equals_its_record(tmp_path: Path, name: str) -> None:
    recorded = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    result = record(name, tmp_path)
    assert result["runs"].keys() == recorded["runs"].keys()
    for place, run in recorded["runs"].items():
        assert result["runs"][place]["rollouts"] == run["rollouts"]
        assert result["runs"][place]["metrics"] == close(run["metrics"])
    assert result["weights"] == close(recorded["weights"])
