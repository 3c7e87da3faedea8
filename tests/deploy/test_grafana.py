"""The Grafana board: each metric in its queries is one that the service reports, with the labels that it groups by."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from tests.service.support.inprocess import api

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text())
PAGE = (ROOT / "docs" / "reference" / "metrics.md").read_text()
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]


def base(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_metrics_of_the_board_are_reported(tmp_path: Path) -> None:
    async def scrape() -> str:
        async with api(tmp_path, database=None) as app:
            return (await app.http.get("/metrics")).text

    reported = set(re.findall(r"^# TYPE (\w+)", asyncio.run(scrape()), re.MULTILINE))
    named = {name for query in QUERIES for name in re.findall(r"\b(?:tinsmith|process)_\w+", query)}
    assert len(named) > 20
    assert sorted(name for name in named if base(name) not in reported) == []


def test_labels_of_the_board_are_documented() -> None:
    rows = re.findall(r"^\| (`tinsmith_.*?) \| (.*?) \|", PAGE, re.MULTILINE)
    labels = {name: cell.split(", ") for names, cell in rows for name in re.findall(r"`(\w+)`", names)}
    for query in QUERIES:
        grouped = {label for each in re.findall(r"by \((.*?)\)", query) for label in each.split(", ")} - {"le"}
        for name in set(re.findall(r"\btinsmith_\w+", query)):
            assert grouped <= set(labels[base(name)]), query


def test_panels_have_places_of_their_own() -> None:
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in BOARD["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
