"""Kills of the processes of a cluster under the load of the fault suite: no law of the service is broken.

`python -m tests.cluster.test_faults --kills 200 --seed 3` does a run by hand and prints its report.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.faults.plan import Plan
from tests.faults.run import Report, Run, fake_config, quieten
from tinsmith.engine.cluster.config import ClusterConfig

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore:DEPRECATED"),  # load_state of the SDK
    pytest.mark.timeout(600),
]

WEIGHTS = {"kill_process": 70, "kill_engine": 10, "kill_api": 12, "kill_both": 4, "stop_engine": 4}
"""`kill_process` kills one of a training process and two sampling processes; `kill_engine` kills all three."""


def run(folder: Path, seed: int, count: int, tenants: int = 3) -> Report:
    """Carry out a plan of kills on a service with one training process and two sampling processes."""
    quieten()
    plan = Plan.draw(seed, count, WEIGHTS, longest_s=1.5)
    config = fake_config(folder / "data").model_copy(update={"cluster": ClusterConfig(samplers=2)})
    return Run(folder, plan, tenants, config).run(lambda number: print(f"{number} faults", flush=True))


def test_kills_of_processes_break_no_law(tmp_path: Path) -> None:
    report = run(tmp_path, 18, 20)
    assert report.violations == []
    assert report.kills >= 18
    assert report.rounds > 0


def main() -> None:
    """Do one run and print its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=18)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), arguments.seed, arguments.kills)
    print(json.dumps(asdict(report), indent=1), Counter(report.faults).total())
    raise SystemExit(bool(report.violations))


if __name__ == "__main__":
    main()
