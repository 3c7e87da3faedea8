"""Metrics that a run and a service report are on docs/reference/metrics.md."""

from __future__ import annotations

import re

from tests.docs.test_pages import ROOT
from tests.rl.scripted_run import rows, run, settings
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.testing import ScriptedPolicy

PAGE = (ROOT / "docs" / "reference" / "metrics.md").read_text()


def documented(name: str) -> bool:
    names = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    patterns = [entry for cell in names for entry in re.findall(r"`([^`]+)`", cell)]
    return any(
        re.fullmatch(re.escape(entry).replace("NAME", "[^/]+").replace("ROLE", "[^/]+").replace("…", ".+"), name)
        for entry in patterns
    )


def test_metrics_of_a_run_are_documented(tmp_path):
    async def connect(state: str, version: int) -> ScriptedPolicy:
        return ScriptedPolicy(("yes, it is", "no"), tmp_path / "weights", state=state, version=version)

    run(settings(tmp_path / "run", steps=2), connect)
    names = {name for row in rows(tmp_path / "run") for name in row if "/" in name}
    assert len(names) > 20
    assert sorted(name for name in names if not documented(name)) == []


def test_metrics_of_the_service_are_documented():
    text = Telemetry(lambda: [], None).scrape().decode()
    names = set(re.findall(r"^# TYPE (tinsmith_\w+) (?:counter|gauge|histogram)$", text, re.MULTILINE))
    names = {name for name in names if not name.endswith("_created")}
    assert len(names) > 5
    assert sorted(name for name in names if f"`{name}`" not in PAGE) == []
