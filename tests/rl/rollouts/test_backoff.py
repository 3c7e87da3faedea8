"""A run that leaves its bounds samples less far ahead, then skips updates, and recovers."""

from __future__ import annotations

import pytest

from tests.rl.scripted_run import Killed, breaking, rows, run, settings
from tinsmith.rl.rollouts.backoff import Backoff, BackoffConfig

GOOD = {"optim/ess_tokens": 0.9, "optim/kl_sample_train_k3": 0.01}
FAST = {
    "staleness": 4,
    "steps": 14,
    "optimizer": {"learning_rate": 2.0},
    "algorithm": {"advantage": {"std_threshold": None}, "kl": {"type": "k2", "coef": 1e-9}},
    "backoff": {"kl_above": 0.02, "recovery": 2},
}


@pytest.mark.parametrize("bad", [{"optim/ess_tokens": 0.29}, {"optim/kl_sample_train_k3": 0.051}])
def test_guard_begins_out_of_bounds_and_ends_after_recovery(bad):
    backoff = Backoff(BackoffConfig(recovery=2), {})
    assert not backoff.observe(1, GOOD)
    assert not backoff.guarded
    assert backoff.observe(2, {**GOOD, **bad})
    assert backoff.guarded
    backoff.observe(3, GOOD)
    backoff = Backoff(BackoffConfig(recovery=2), backoff.state)
    assert backoff.guarded
    backoff.observe(4, {**GOOD, **bad})  # counts from the beginning again
    backoff.observe(5, GOOD)
    assert backoff.guarded
    backoff.observe(6, GOOD)
    assert not backoff.guarded


def test_run_without_backoff_is_never_on_guard():
    backoff = Backoff(None, {"guarded": 1.0})
    assert not backoff.observe(1, {"optim/ess_tokens": 0.0})
    assert (backoff.guarded, backoff.state) == (False, {})


def test_run_backs_off_and_resumes_equally(tmp_path):
    run(settings(tmp_path / "whole", **FAST))
    steps = [row for row in rows(tmp_path / "whole") if "reward/mean" in row]
    guarded = [row["policy/guarded"] for row in steps]
    assert 1.0 in guarded
    skipped = [row for row in steps if row.get("optim/skipped") and row.get("optim/kl_sample_train_k3", 0.0) > 0.02]
    assert skipped
    first = guarded.index(1.0)
    assert max(row["policy/staleness_max"] for row in steps[first + 5 : first + 6]) <= 1
    with pytest.raises(Killed):
        run(settings(tmp_path / "cut", **FAST), breaking(tmp_path / "cut", calls=4, at="train"))
    run(settings(tmp_path / "cut", **FAST))
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")


def test_backoff_needs_batches_that_are_admitted_by_step(tmp_path):
    with pytest.raises(ValueError, match=r"backoff needs mode both and sync\.style fixed"):
        settings(tmp_path, backoff={}, sync={"style": "live"})
