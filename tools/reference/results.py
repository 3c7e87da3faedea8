"""Measurements in benchmarks/results, for the pages that quote them."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def measured(name: str) -> str:
    """A result's Markdown without its title."""
    file = RESULTS / f"{name}.md"
    return file.read_text().partition("\n")[2].strip() if file.is_file() else "No result yet."
