"""The long run, by `make test-faults`: a plan of a thousand kills and more. `--add` adds it to benchmarks/results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.plan import Plan
from tests.faults.report import read_reports, write_reports
from tests.faults.run import Run, fake_config, quieten

pytestmark = [
    pytest.mark.faults,
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.filterwarnings("ignore:DEPRECATED"),  # load_state of the SDK
]

TENANTS = 6


def test_many_faults_break_no_law(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    quieten()
    plan = Plan.draw(request.config.getoption("--seed"), request.config.getoption("--faults"))
    (tmp_path / "plan").write_text(f"{plan}\n")
    report = Run(tmp_path, plan, TENANTS, fake_config(tmp_path / "data")).run()
    if request.config.getoption("--add"):
        write_reports([*read_reports(), report])
    assert report.violations == []
