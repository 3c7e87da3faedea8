"""Settings of a run file that have no effect are errors that name what would use them."""

from __future__ import annotations

import pytest

from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.runner import server
from tinsmith.settings import build

GRPO_RUN = {
    "model": {"name": "toy"},
    "tasks": {"train": {"type": "addition"}},
    "rewards": [{"type": "closeness"}],
    "steps": 3,
}


SFT_RUN = {
    "model": {"name": "toy"},
    "algorithm": {"type": "sft"},
    "demonstrations": {"data": {"type": "addition"}, "per_step": 4},
    "steps": 3,
}


def read(values, **changes):
    """Settings of a run file with changes."""
    return build(RunConfig, {**values, **changes}, "run.yaml")


def refused(values, words, **changes):
    """Assert that a run file is an error whose text has `words`."""
    with pytest.raises(ConfigError) as caught:
        read(values, **changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (
            "buffer",
            {"type": "memory", "replay": {"cooldown": 1.0}},
            "cooldown is not used with enable: false; set enable to true",
        ),
        (
            "buffer",
            {"type": "memory", "replay": {"enable": True, "sigma": 1.0}},
            "sigma is not used with priority: linear_decay; set priority to",
        ),
        ("rollout", {"timeout_warmup": 5}, "timeout_warmup is not used without timeout_ratio"),
        ("rollout", {"over": {"wait": 5.0}}, "wait is not used without ratio"),
        (
            "optimizer",
            {"min_ratio": 0.1},
            "min_ratio is not used with schedule: constant; set schedule to linear or cosine",
        ),
        ("algorithm", {"type": "grpo_std", "kl": {"type": "k3"}}, "type k3 needs a coef"),
        ("algorithm", {"kl": {"type": "k3", "coef": 0.1, "horizon": 9}}, "horizon is not used without target"),
        (
            "algorithm",
            {"type": "opmd", "advantage": {"tau": 5.0}},
            "tau is not used with baseline: mean; set baseline to logavgexp",
        ),
        (
            "algorithm",
            {"type": "rec", "loss": {"ring_low": 0.5}},
            "ring_low is not used with clip: one_side; set clip to ring",
        ),
        (
            "algorithm",
            {"type": "rec", "loss": {"clip": "none", "clip_low": 0.1}},
            "clip_low is not used with clip: none",
        ),
        (
            "algorithm",
            {"type": "rec", "loss": {"temperature": 2.0}},
            "temperature is not used with weight: none; set weight to advantage",
        ),
        (
            "algorithm",
            {"type": "rec", "loss": {"regularizer_coef": 2.0}},
            "regularizer_coef is not used with regularizer: none",
        ),
        ("eval", {"before": False, "baseline": 3}, "baseline is not used with before: false; set before to true"),
        ("bench", {"checkpoints": ["tinker://a/b"], "of_run": "all"}, "leave out one"),
        ("rewards", [{"type": "math_boxed", "form": 0.5}], "form is not used with think: false; set think to true"),
    ],
)
def test_dependent_key_without_its_switch_is_an_error(section, values, words):
    refused(GRPO_RUN, words, **{section: values})


def test_difficulty_rho_requires_by():
    tasks = {"train": {"type": "addition"}, "order": {"type": "difficulty", "rho": 0.5}}
    refused(GRPO_RUN, "rho is not used without by", tasks=tasks)


def test_unused_keys_may_have_their_default():
    run = read(GRPO_RUN, rollout={"timeout_warmup": 1, "over": {"wait": 30.0}}, optimizer={"min_ratio": 0.0})
    again = run.model_dump(mode="json")
    assert build(RunConfig, {**again, "eval": {}, "bench": {}}, "run.yaml").rollout == run.rollout


ROWS = {"type": "jsonl", "path": "rows.jsonl"}


@pytest.mark.parametrize("key", ["reply", "chosen", "rejected", "tools_key"])
def test_tasks_reject_keys_of_demonstrations(key):
    words = f"{key} applies only to demonstrations; remove it here"
    refused(GRPO_RUN, words, tasks={"train": {**ROWS, key: "some"}})
    refused(GRPO_RUN, words, tasks={"train": {"type": "addition"}, "eval": {"one": {**ROWS, key: "some"}}})


@pytest.mark.parametrize(("key", "value"), [("reply_prefix", "So:"), ("extra", ["level"])])
def test_demonstrations_reject_keys_of_tasks(key, value):
    refused(SFT_RUN, f"{key} applies only to tasks", demonstrations={"data": [{**ROWS, key: value}]})


def test_plain_text_rejects_chat_keys():
    demonstrations = {"data": {**ROWS, "system": "Be brief."}, "learn": "text"}
    refused({**SFT_RUN, "algorithm": {"type": "cpt"}}, "system applies only to chats", demonstrations=demonstrations)


def test_per_step_and_ratio_exclude_each_other():
    demonstrations = {"data": {"type": "addition"}, "per_step": 3, "ratio": 0.3}
    refused(SFT_RUN, "leave out one", demonstrations=demonstrations)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group_size", 4),
        ("staleness", 1),
        ("sync", {"interval": 2}),
        ("buffer", {"type": "memory", "max_staleness": 1}),
        ("filters", [{"type": "cut"}]),
    ],
)
def test_sft_run_rejects_keys_of_rollouts(key, value):
    refused(SFT_RUN, f"{key} is not used with algorithm.type: sft, which samples no rollouts", **{key: value})
    learned = {"name": "sft", "algorithm": {"type": "sft"}, "demonstrations": SFT_RUN["demonstrations"]}
    stages = [learned, {"name": "grpo"}]
    values = {**GRPO_RUN, key: value}
    assert key not in read(values, stages=stages).stage_config(1, "").model_fields_set
    refused(
        GRPO_RUN,
        f"stage sft: {key} is not used with algorithm.type: sft",
        stages=[{**stages[0], key: value}, stages[1]],
    )


@pytest.mark.parametrize(
    ("kind", "part", "words"),
    [
        ("sft", {"kl": {"type": "k2", "coef": 0.1}}, "kl is not used with algorithm.type: sft"),
        ("cpt", {"entropy": {"coef": 0.1}}, "entropy is not used with algorithm.type: cpt"),
        ("sft", {"kl_penalty": {"type": "k1", "coef": 0.1}}, "kl_penalty is not used with algorithm.type: sft"),
        ("dpo", {"advantage": {"type": "rloo"}}, "advantage is not used with algorithm.type: dpo"),
        ("dpo", {"aggregate": "token_sum"}, "aggregate is not used with algorithm.type: dpo"),
        ("sft", {"refill": True}, "refill is not used with algorithm.type: sft, which samples no rollouts"),
        ("sft", {"loss": {"type": "ppo"}}, "sft needs a likelihood loss"),
    ],
)
def test_supervised_algorithms_reject_parts_for_rollouts(kind, part, words):
    refused(SFT_RUN, words, algorithm={"type": kind, **part})


def test_sft_accepts_other_losses_and_dpo_a_divergence():
    assert read(SFT_RUN, algorithm={"type": "sft", "loss": {"type": "sft_phi"}}).algorithm.loss.type == "sft_phi"
    dpo = {"type": "dpo", "kl": {"type": "k2", "coef": 0.1}, "aggregate": "token_sum"}
    assert read(SFT_RUN, algorithm=dpo).algorithm.aggregate == "token_sum"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"sync": {"style": "live"}, "staleness": 2},
            "staleness is not used with sync.style: live; set buffer.capacity",
        ),
        (
            {"buffer": {"type": "memory", "capacity": 2}},
            "buffer.capacity is not used with sync.style: fixed; set staleness",
        ),
        ({"sync": {"in_flight": 3}}, "in_flight is not used with style: fixed; set style to live"),
        ({"sync": {"method": "memory", "keep": 5}}, "keep is not used with method: memory"),
    ],
)
def test_rejects_run_ahead_keys_unused_by_the_style(changes, words):
    refused(GRPO_RUN, words, **changes)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([{"name": "a", "keep_optimizer": True}, {"name": "b"}], "stage a: no stage trains before it"),
        ([{"name": "a"}, {"name": "b", "mode": "bench", "keep_optimizer": True}], "stage b: mode bench trains nothing"),
    ],
)
def test_keep_optimizer_requires_a_previous_training_stage(stages, words):
    refused(GRPO_RUN, words, stages=stages)


def test_service_settings_are_noted_when_unused(monkeypatch, capsys):
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    run = read(GRPO_RUN, model={"name": "toy", "base_url": "http://there:1"}, service={"dtype": "float32"})
    with server(run) as (url, _):
        assert url == "http://there:1"
    assert "note: service.dtype: not used, because the run connects to http://there:1" in capsys.readouterr().err


def test_threshold_is_refused_where_a_reward_says_what_is_right():
    held_out = {"train": {"type": "addition"}, "eval": {"a": {"type": "addition"}, "b": {"type": "addition"}}}
    unsaid = [{"type": "format", "pattern": "yes"}]
    words = "eval.threshold is not used: the reward closeness says what is right"
    refused(GRPO_RUN, words, tasks=held_out, eval={"threshold": 0.5})
    refused(GRPO_RUN, words, tasks=held_out, rewards=[*unsaid, {"type": "closeness"}], eval={"threshold": 0.9})
    assert read(GRPO_RUN, tasks=held_out, eval={"threshold": 0.5, "rewards": unsaid}).eval.threshold == 0.5
    of_b = {"threshold": 0.5, "sources": {"b": {"rewards": unsaid}}}
    assert read(GRPO_RUN, tasks=held_out, eval=of_b).eval.threshold == 0.5
