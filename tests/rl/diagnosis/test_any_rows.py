"""Any rows can be diagnosed: missing metrics, numbers that are not finite, and settings of any form never raise."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.rl.diagnosis import diagnose

NAMES = (
    "reward/mean", "reward/std", "groups/constant", "groups/all_right", "groups/all_wrong", "groups/equal",
    "rollouts/equal", "rollouts/failed", "rollouts/cut", "rollouts/max_turns", "tokens/reply", "filters/dropped",
    "policy/staleness", "policy/guarded", "optim/skipped", "optim/lr", "optim/grad_norm", "optim/loss",
    "optim/entropy", "optim/ess_tokens", "optim/kl_sample_train_v2", "optim/kl_sample_train_k3", "optim/ratio_max",
    "optim/clip_fraction", "optim/kl_reference_k3", "optim/expert_nll", "critic/explained_variance", "critic/lr",
    "optim/pairs/accuracy", "eval/pass@1", "eval/reward/mean", "eval/constant_pass@1", "eval/tasks", "eval/equal",
    "eval/failed",
)  # fmt: skip
VALUES = st.one_of(
    st.floats(),
    st.floats(-1, 2),
    st.integers(-(10**400), 10**400),
    st.sampled_from((0, 1, 1e308, -1e308, math.nan, None, True, "text", [1])),
)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=12).flatmap(
        lambda row: st.one_of(st.just(0), st.integers(0, 40), VALUES).map(lambda step: {"step": step, **row})
    ),
    max_size=30,
)
SETTINGS = st.recursive(
    VALUES,
    lambda values: st.dictionaries(
        st.sampled_from(
            ("steps", "group_size", "groups_per_step", "sampling", "max_tokens", "temperature", "algorithm", "critic",
             "warmup_steps", "optimizer", "learning_rate", "updates", "epochs", "staleness", "eval", "num_samples")
        ),
        values,
    ),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=50)
@given(SETTINGS.filter(lambda each: isinstance(each, dict)), ROWS)
def test_any_settings_and_rows_are_diagnosed(run_settings, rows):
    diagnosis = diagnose(run_settings, rows)
    assert diagnosis.updates is None or 0 <= diagnosis.updates <= diagnosis.steps
    assert isinstance(diagnosis.summary, str)
    for finding in diagnosis.findings:
        assert finding.sentence.endswith(".")
        assert finding.change.text.endswith(".")


@settings(max_examples=50)
@given(st.integers(0, 30), st.sampled_from(NAMES), st.sampled_from((math.nan, None, math.inf)))
def test_every_prefix_of_a_run_is_diagnosed(length, name, value):
    rows = [{"step": step, **dict.fromkeys(NAMES, 0.5), **({name: value} if step % 3 else {})} for step in range(1, 31)]
    assert diagnose({"steps": 30}, rows[:length]).steps == length
