"""Trinity-RFT's names of metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rl.scripted_run import rows, run, settings
from tinsmith.integrations.trinity.metric_names import TRINITY, trinity_name


def test_trinity_names_are_unique_and_of_existing_metrics(tmp_path: Path):
    run(settings(tmp_path, steps=1))
    names = {name for row in rows(tmp_path, timeless=False) for name in row}
    names |= {"reward/kl", "reward/kl_coef", "optim/kl", "optim/kl_coef"}  # with a divergence
    names |= {"critic/explained_variance", "critic/value_mean", "critic/return_mean"}  # with a critic
    assert set(TRINITY) <= names
    assert len(set(TRINITY.values())) == len(TRINITY)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("reward/format", "rollout/format/mean"),
        ("reward/std", "reward/std"),
        ("eval/pass@1", "eval/eval/accuracy/mean"),
        ("eval/gsm8k/pass@1", "eval/gsm8k/accuracy/mean"),
        ("eval/gsm8k/reward/mean", "eval/gsm8k/reward/mean"),
        ("eval/reward/mean", "eval/eval/reward/mean"),
        ("eval/pass@4", "eval/pass@4"),
        ("time/eval", "time/eval"),
    ],
)
def test_trinity_name_of_metric_families(ours: str, theirs: str):
    assert trinity_name(ours) == theirs
