"""Some faults of each kind, in a minute. The long run is test_long.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.plan import KILLS, OTHERS, REQUEST_FAULTS, STOPS, Plan
from tests.faults.run import Run, fake_config, quieten, torch_config

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.filterwarnings("ignore:DEPRECATED"),  # load_state of the SDK
]

SEED = 16


def test_plan_repeats_and_has_every_kind() -> None:
    plan = Plan.draw(SEED, 40)
    assert plan == Plan.draw(SEED, 40)
    assert plan != Plan.draw(SEED + 1, 40)
    assert {fault.kind for fault in plan.faults} == {*KILLS, *STOPS, *REQUEST_FAULTS, *OTHERS}


def test_faults_break_no_law(tmp_path: Path) -> None:
    """Fails if the journal forgets a finished request (`requests_to_replay`) or a repeated one runs (`is_accepted`)."""
    quieten()
    plan = Plan.draw(SEED, 36, longest_s=0.5)
    print(plan)
    report = Run(tmp_path, plan, 3, fake_config(tmp_path / "data")).run()
    print(report)
    assert report.violations == []
    assert report.kills >= 12
    assert report.checkpoints > 0


@pytest.mark.slow
def test_kills_leave_real_weights_bit_equal(tmp_path: Path, tiny_llama: Path) -> None:
    """Fails if a replay runs the passes of a step in other batches than before (`groupby` in Journal.restore)."""
    quieten()
    plan = Plan.draw(SEED, 6, dict.fromkeys([*KILLS, "stop_engine"], 1))
    print(plan)
    run = Run(tmp_path, plan, 1, torch_config(tmp_path / "data", tiny_llama), sampling_tolerance=1e-5)
    report = run.run()
    assert report.violations == []
