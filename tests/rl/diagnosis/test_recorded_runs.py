"""Recorded runs have the findings that fit them, and healthy ones have none at any time (cases.py records them)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rl.diagnosis.cases import rows_of
from tinsmith.rl.diagnosis import Change, diagnose, first_batch

RUNS = Path(__file__).parent / "runs"
HEALTHY = (
    "learns", "learns_with_staleness", "learns_from_demonstrations", "is_solved", "learns_with_filters", "short",
    "learns_pairs", "learns_a_game", "keeps_what_it_knows", "smol_good",
)  # fmt: skip
SICK: dict[str, dict[str, str]] = {
    "all_wrong": {
        "no_update": "None of the 8 steps updated the weights: in each of them, every reply was wrong (mean reward 0)"
    },
    "all_right": {"no_update": "Use harder tasks in tasks.train"},
    "one_reward": {"no_update": "every reply to a task got the same reward (mean reward 0). Set group_size: 8"},
    "same_format": {"no_update": "every reply to a task got the same reward (mean reward 1). Set group_size: 8"},
    "greedy": {"no_update": "Set sampling.temperature: 1. At 0 all"},
    "single_replies": {
        "few_updates": "Only 6 of 20 steps updated the weights: in 14 of the others, every reply was wrong"
    },
    "cut": {
        "no_update": "100 % of the replies were cut off at sampling.max_tokens 4 (mean reward 0). Set sampling.max_tok"
    },
    "right_and_cut": {
        "no_update": "every reply was right (mean reward 1), so there was nothing to compare, and 100 % of the replies"
    },
    "format_right_and_cut": {
        "no_update": "were cut off at sampling.max_tokens 3. Set sampling.max_tokens: 8. If whole"
    },
    "cut_and_masked": {"cut_off": "34 % of the replies are cut off at sampling.max_tokens 6"},
    "filtered": {"no_update": "the filters dropped every group. Set filter_refills: 4"},
    "failing": {"failing_rollouts": "48 rollouts failed, 25 % of all, and 25 % of the answers of evaluations, which"},
    "collapsed": {"equal_replies": "100 % of the replies to different tasks of the last steps are the same text (44 %"},
    "entropy_collapse": {"equal_replies": "Set optimizer.learning_rate: 0.0003. Then start again."},
    "flat": {"learning_rate_high": "The learning rate is 0.02, and the reward has not risen."},
    "tiny_rate": {"learning_rate_low": "The learning rate is 1e-07 at most"},
    "spikes": {"gradient_spikes": "far above the median of 4.6: 3,634 in step 49. Set optimizer.grad_clip_norm: 9."},
    "learns_a_format": {},
    "form_only": {
        "equal_replies_pay": "and the reward pays for it. The reward rose (0.555 → 0.969), and held-out tasks did not",
    },
    "below_constant": {
        "equal_replies": "the policy has collapsed. Nothing learned: eval/pass@1 is 0.25 after training, and the best "
        "constant answer has 0.75. Set optimizer.learning_rate: 0.0003. Then start again.",
    },
    "useless_critic": {"critic": "it explains 0 % of their variance after 20 steps"},
    "too_old": {"off_policy": "optim/kl_sample_train_k3 is 0.301 (above 0.05). Set staleness: 3."},
    "smol_high": {
        "learning_rate_high": "rate is 3, and the reward has not risen. Nothing learned: eval/pass@1 is 0 after "
        "training, and the best constant answer has 0.0938. Set optimizer.learning_rate: 0.0003. Then start again.",
    },
    "smol_few_steps": {
        "learning_rate_high": "learning rate is 3, and the reward has not risen. Set optimizer.learning_rate: 0.0003."
    },
    "smol_rate_high": {
        "equal_replies": "100 % of the replies to different held-out tasks are the same text (42 % at first): the "
        "policy has collapsed. The learning rate is 0.03, and the reward has not risen. Nothing learned: eval/pass@1",
    },
    "smol_old": {
        "equal_replies": "the policy has collapsed. The reward fell from 0.139 around step 7 to 0. Nothing learned:",
        "off_policy": "optim/ess_tokens is 0.0475 (below 0.3), optim/kl_sample_train_k3 is 10.2 (above 0.05)",
    },
    "smol_ppo": {"critic": "it explains 0 % of their variance after 16 steps"},
    "smol_cut": {
        "cut_off": "rewards read unfinished text. Nothing learned: eval/pass@1 is 0 after training, and the best "
        "constant answer has 0.125. Set sampling.max_tokens: 2."
    },
    "other_sampler": {"sampler_mismatch": "v2 is 0.0717 although the weights are the same. Set algorithm.correction"},
    "too_hot": {"sampler_mismatch": "Set sampling.temperature: 1. Leave out top_p and top_k."},
    "far_away": {"far_from_reference": "The policy is 1.07 nats per token from its reference"},
    "endless_game": {"max_turns": "66 % of the rollouts end at the largest number of turns, not by themselves. Set wo"},
    "unwinnable_game": {"no_update": "of turns (mean reward 0). Set workflow.max_turns: 4."},
    "diverging": {"demonstrations_diverge": "The negative log-likelihood of the demonstrations rose: 0.549 → "},
    "smol_sure": {"entropy_collapse": "The entropy has collapsed (2.61 → 0.0275 nats per token)"},
    "smol_slow": {"cut_off": "37 % of the replies are cut off at sampling.max_tokens 8; rewards read unfinished text."},
    "unlearned_pairs": {"pairs_not_learned": "after 20 steps, no more than by chance. Set optimizer.learning_rate: 0."},
}


def run(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    values = json.loads((RUNS / f"{name}.json").read_text())
    return values["settings"], rows_of(values)


@pytest.mark.parametrize("name", SICK)
def test_sick_runs_have_their_findings(name):
    findings = {each.name: each.text for each in diagnose(*run(name)).findings}
    assert findings.keys() == SICK[name].keys()
    for finding, part in SICK[name].items():
        assert part in findings[finding]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_have_none_at_any_time(name):
    settings, rows = run(name)
    for length in range(len(rows) + 1):
        assert diagnose(settings, rows[:length]).findings == ()
    assert diagnose(settings, rows).updates


def test_every_recorded_run_is_expected():
    assert {file.stem for file in RUNS.glob("*.json")} == {*SICK, *HEALTHY}


def test_one_cause_is_one_finding():
    """A policy that writes nothing else has short, cut-off replies without a signal; only the cause is named."""
    settings, rows = run("collapsed")
    diagnosis = diagnose(settings, rows)
    assert diagnosis.summary == "1 of 20 steps updated the weights: equal replies in 19"
    assert [each.severity for each in diagnosis.findings] == ["error"]


@pytest.mark.parametrize("name", SICK)
def test_a_setting_is_changed_once_at_any_time(name):
    settings, rows = run(name)
    for length in range(len(rows) + 1):
        changes = [finding.change for finding in diagnose(settings, rows[:length]).findings]
        assert len({change.setting or change.text for change in changes}) == len(changes)


def test_a_reward_in_use_is_not_recommended():
    settings, rows = run("all_wrong")
    assert "such as rewards: [{type: closeness}]" in diagnose(settings, rows).findings[0].text
    advice = diagnose({**settings, "rewards": [{"type": "closeness"}]}, rows).findings[0].text
    assert "to replies that are no bare number" in advice


def test_what_a_cause_explains_is_named():
    finding = diagnose(*run("cut")).findings[0]
    assert (finding.severity, finding.explains) == ("error", ("cut_off",))
    worse = diagnose(*run("smol_cut")).findings[0]
    assert (worse.name, worse.severity, worse.explains) == ("cut_off", "error", ("below_constant",))


def test_unjudged_rewards_do_not_hide_findings():
    """pass@1 is 1 where every reward is above eval.threshold and nothing says what is right."""
    settings, rows = run("far_away")
    assert rows[-1]["eval/pass@1"] == 1.0
    assert diagnose(settings, rows).findings


def test_an_environment_with_its_own_limit_is_named():
    settings, rows = run("endless_game")
    settings = {**settings, "workflow": {}, "environment": {"type": "openenv", "max_turns": 12}}
    assert diagnose(settings, rows).findings[0].change == Change(setting="environment.max_turns", value=24)


def test_first_batch_cut_off_is_noted():
    settings, rows = run("cut")
    assert first_batch(settings, rows[1]) == (
        "100 % of the first replies are cut off at sampling.max_tokens 4. Unless the model is to learn to be shorter, "
        "set sampling.max_tokens: 8."
    )
    assert first_batch(*run("learns")[:1], run("learns")[1][1]) == ""


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_gradients_that_are_not_finite(value):
    rows = [{"step": step, "optim/grad_norm": value if step > 2 else 1.0, "optim/lr": 1.0} for step in range(1, 5)]
    finding = diagnose({}, rows).findings[0]
    assert finding.name == "not_finite"
    assert finding.sentence == "The gradient of 2 steps was not finite, first in step 3."
