"""Minibatches, epochs and streamed gradients of whole runs, with the scripted policy."""

from __future__ import annotations

import pytest

from tests.rl.scripted_run import rows, run, settings
from tests.rl.test_unused_settings import GRPO_RUN, SFT_RUN, refused

SIGNAL = {"advantage": {"std_threshold": None}}


@pytest.mark.parametrize("algorithm", [SIGNAL, {"loss": {"type": "topr"}}, {"kl": {"type": "k2", "coef": 0.1}}])
def test_streamed_run_equals_the_unstreamed_run(tmp_path, algorithm):
    changes = {"algorithm": algorithm, "steps": 3, "eval": {}, "tasks": {"train": {"type": "addition"}}}
    run(settings(tmp_path / "whole", **changes))
    run(settings(tmp_path / "streamed", updates={"stream": 2}, **changes))
    whole, streamed = ([row for row in rows(tmp_path / name) if "optim/loss" in row] for name in ("whole", "streamed"))
    assert len(whole) == 3
    for expected, row in zip(whole, streamed, strict=True):
        for name in ("optim/loss", "optim/grad_norm", "optim/ratio_mean", "optim/kl_sample_train_v2", "optim/rows"):
            assert row[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9), name


def test_minibatches_and_epochs_take_several_optimizer_steps(tmp_path):
    state = run(settings(tmp_path, algorithm=SIGNAL, updates={"minibatches": 3, "epochs": 2, "shuffle": True}))
    steps = [row["optim/steps"] for row in rows(tmp_path) if "optim/steps" in row]
    assert max(steps) == 6
    trained = sum("optim/steps" in row for row in rows(tmp_path))
    assert state.version == trained  # batches, not optimizer steps
    assert all(row["policy/staleness"] == 0 for row in rows(tmp_path) if "policy/staleness" in row)
    later = [row for row in rows(tmp_path) if row.get("optim/steps", 0) > 1]
    assert all(row["optim/ratio_max"] > 1 or row["optim/ratio_min"] < 1 for row in later)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"updates": {"minibatches": 17}}, "a batch has 16 groups, which stay whole"),
        ({"updates": {"stream": 17}}, "updates.stream is 17"),
        ({"updates": {"shuffle": True}}, "shuffle is not used with minibatches: 1"),
        ({"updates": {"stream": 2, "epochs": 2}}, "stream is not used with minibatches or epochs above 1"),
        ({"updates": {"stream": 2}, "algorithm": {"type": "rloo"}}, "aggregate token_mean divides by the lengths"),
        (
            {"updates": {"stream": 2}, "algorithm": {"advantage": {"type": "grpo", "normalize": "batch"}}},
            "advantage grpo compares a group with the others",
        ),
        ({"updates": {"stream": 2}, "algorithm": {"refill": True}}, "refill copies replies of the whole batch"),
        ({"updates": {"minibatches": 2}, "algorithm": {"refill": True}}, "has no groups to divide"),
        ({"algorithm": {"loss": {"type": "stable_reinforce"}}}, "stable_reinforce has no published formula"),
        ({"algorithm": {"correction": {"mask_low": 0.3}}}, "mask_low is not used with mask: none"),
    ],
    ids=str,
)
def test_divisions_without_effect_or_meaning_are_refused(changes, words):
    refused(GRPO_RUN, words, **changes)


def test_updates_fit_batches_of_demonstrations():
    refused(SFT_RUN, "a batch has 4 demonstrations", updates={"minibatches": 5})
    refused(SFT_RUN, "stream is not used with algorithm.type: sft", updates={"stream": 2})
