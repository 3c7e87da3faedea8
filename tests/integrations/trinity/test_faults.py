"""Faults in files of Trinity: each error names the key and the fix, and nothing starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trinity.examples import LORA, NO_TINKER, Pairs
from tests.integrations.trinity.files import SMALL, read, with_key
from tinsmith.errors import ConfigError

TASKSET, TASKSETS = "buffer.explorer_input.taskset", "buffer.explorer_input.tasksets"
BUFFER = "buffer.trainer_input.experience_buffer"
NO_TASKSET: Pairs = ((TASKSET, None),)

FAULTS: list[tuple[str, Pairs, str, str]] = [
    ("an unknown mode", (("mode", "foo"),), "mode", "'both', 'explore', 'train'"),
    (
        "a run that serves",
        (("mode", "serve"),),
        "mode",
        "Use: tinsmith serve --model tiny --host localhost --port 8010",
    ),
    ("a bench of nothing", (("mode", "bench"),), "buffer.explorer_input.eval_tasksets", "Give at least one."),
    (
        "training without an end",
        (*NO_TASKSET, ("mode", "train"), ("buffer.train_batch_size", 8), ("buffer.total_steps", None)),
        "trainer.total_steps",
        "Set trainer.total_steps, or give the taskset",
    ),
    ("sampling without tasks", (*NO_TASKSET, ("mode", "explore")), TASKSET, "Give at least one taskset."),
    ("an unknown module", (("algorithm.algorithm_type", "foo"),), "algorithm.algorithm_type", "Known here: ppo, grpo"),
    (
        "longer than the model's length",
        (("model.max_model_len", 70),),
        "model.max_model_len",
        "(64 + 16) is more than max_model_len (70). Raise it to 80",
    ),
    (
        "no length at all",
        (("model.max_prompt_tokens", None), ("model.max_response_tokens", None)),
        "model.max_model_len",
        "Set model.max_response_tokens, or model.max_model_len.",
    ),
    ("an unknown method", (("synchronizer.sync_method", "foo"),), "synchronizer.sync_method", "'nccl', 'checkpoint'"),
    (
        "an unknown style",
        (("synchronizer.sync_style", "foo"),),
        "synchronizer.sync_style",
        "'fixed', 'explorer_driven'",
    ),
    ("another critic", (("model.critic_model_path", "big"),), "model.critic_model_path", "name the same model"),
    ("an interval of 0", (("synchronizer.sync_interval", 0),), "synchronizer.sync_interval", "Set 1"),
    (
        "over-rollout in style fixed",
        (("explorer.over_rollout.ratio", 0.5),),
        "explorer.over_rollout",
        "Set synchronizer.sync_style: explorer_driven or trainer_driven",
    ),
    ("a share above 1", (("explorer.over_rollout.ratio", 1.5),), "explorer.over_rollout.ratio", "less than 1"),
    ("an unknown way to run", (("explorer.concurrent_mode", "x"),), "explorer.concurrent_mode", "'sequential'"),
    ("sft in mode both", (("algorithm.algorithm_type", "sft"),), "mode", "Set mode: train."),
    ("dpo in mode both", (("algorithm.algorithm_type", "dpo"),), "mode", "Set mode: train."),
    ("training without a batch", (("mode", "train"),), "buffer.train_batch_size", "Set it to the number of replies"),
    ("a taskset without a path", ((TASKSET, {}),), f"{TASKSET}.path", "Name a dataset of the hub"),
    (
        "taskset and tasksets",
        ((TASKSETS, [{"path": "a"}]),),
        TASKSETS,
        "taskset and tasksets are both set. Move the one into the other.",
    ),
    ("no taskset", NO_TASKSET, TASKSET, "Give at least one taskset."),
    (
        "an auxiliary model without a path",
        (("explorer.auxiliary_models", [{"name": "judge"}]),),
        "explorer.auxiliary_models[0].model_path",
        "Name a base model of the server",
    ),
    ("a teacher that is not there", (("algorithm.algorithm_type", "jsd"),), "algorithm.advantage_fn", "Name one in"),
    ("all weights", (("model.tinker.enable", False),), "model.lora_configs", "Add lora_configs: [{lora_rank: 32}]"),
    ("two adapters", (*NO_TINKER, ("model.lora_configs", [{}, {}])), "model.lora_configs", "Keep one."),
    ("another alpha", (*NO_TINKER, (f"{LORA}.lora_alpha", 64)), "model.lora_configs[0].lora_alpha", "Set 32"),
    ("an adapter's folder", (*NO_TINKER, (f"{LORA}.path", "x")), "model.lora_configs[0].path", "tinker:// path"),
    ("part of a group", (("buffer.train_batch_size", 6),), "buffer.train_batch_size", "Set a multiple of"),
    (
        "less than one step",
        (("buffer.total_steps", 1), ("buffer.train_batch_size", 32)),
        "buffer.total_steps",
        "gives less than one step of training. Raise it, or lower buffer.train_batch_size.",
    ),
    ("no model", (("model.model_path", ""),), "model.model_path", "Name the base model"),
    (
        "a workflow of one's own",
        (("buffer.explorer_input.default_workflow_type", "some"),),
        "buffer.explorer_input.default_workflow_type",
        "Code of your own needs --plugin-dir",
    ),
    ("an unknown workflow", (("buffer.explorer_input.default_workflow_type", "math_workflo"),), "", "Did you mean"),
    (
        "an expert without data",
        (("algorithm.algorithm_type", "mix"),),
        "buffer.trainer_input.auxiliary_buffers.sft_dataset",
        "Set storage_type: file and a path there.",
    ),
    (
        "all batches too old",
        (
            ("algorithm.sample_strategy", "staleness_control"),
            ("algorithm.sample_strategy_args", {"max_staleness": 0}),
            ("synchronizer.sync_offset", 1),
        ),
        "algorithm.sample_strategy_args.max_staleness",
        "Lower synchronizer.sync_offset",
    ),
    (
        "an unknown priority",
        ((f"{BUFFER}.replay_buffer", {"enable": True, "priority_fn": "linear_deca"}),),
        f"{BUFFER}.replay_buffer.priority_fn",
        "Did you mean 'linear_decay'?",
    ),
    (
        "an unknown argument of it",
        ((f"{BUFFER}.replay_buffer", {"enable": True, "priority_fn_args": {"decai": 1}}),),
        f"{BUFFER}.replay_buffer.priority_fn_args.decai",
        "Did you mean 'decay'?",
    ),
    ("no room", ((f"{BUFFER}.capacity", 0),), f"{BUFFER}.capacity", "Set 1 or more."),
    ("no time", ((f"{BUFFER}.max_read_timeout", 0),), f"{BUFFER}.max_read_timeout", "Set more than 0."),
    (
        "two ways to think",
        (("model.enable_thinking", True), (f"{TASKSET}.format.enable_thinking", False)),
        f"{TASKSET}.format.enable_thinking",
        "Make them alike",
    ),
    ("an unknown level", (("log.level", "loud"),), "log.level", "It is one of DEBUG, INFO"),
    (
        "a judge that is not there",
        (("buffer.explorer_input.default_workflow_type", "rubric_judge_workflow"),),
        "buffer.explorer_input.default_reward_fn_type",
        "Name a model of the server in explorer.auxiliary_models",
    ),
    (
        "an argument of a workflow",
        (
            ("buffer.explorer_input.default_workflow_type", "math_boxed_workflow"),
            (f"{TASKSET}.workflow_args", {"x": 1}),
        ),
        f"{TASKSET}.workflow_args.x",
        "Known here: with_think, format_score_coef, use_base.",
    ),
    (
        "an argument of a reward",
        ((f"{TASKSET}.reward_fn_args", {"pattern": "x"}),),
        f"{TASKSET}.reward_fn_args.pattern",
        "Known here: none.",
    ),
    (
        "a workflow with a world",
        (("buffer.explorer_input.default_workflow_type", "alfworld_workflow"),),
        "buffer.explorer_input.default_workflow_type",
        "Write the environment as a class derived from Environment",
    ),
    (
        "a path that leads nowhere",
        (("buffer.explorer_input.default_workflow_type", "nowhere.flow"),),
        "buffer.explorer_input.default_workflow_type",
        "Set --plugin-dir to its folder",
    ),
    (
        "a reward's path that leads nowhere",
        (("buffer.explorer_input.default_reward_fn_type", "nowhere.reward"),),
        "buffer.explorer_input.default_reward_fn_type",
        "Set --plugin-dir to its folder",
    ),
    (
        "a word for an age",
        (
            ("algorithm.sample_strategy", "staleness_control"),
            ("algorithm.sample_strategy_args", {"max_staleness": "two"}),
        ),
        "algorithm.sample_strategy_args.max_staleness",
        "Set a whole number, 0 or more.",
    ),
    (
        "a word for a share",
        (("algorithm.algorithm_type", "mix"), ("algorithm.sample_strategy_args", {"expert_data_ratio": "half"})),
        "algorithm.sample_strategy_args.expert_data_ratio",
        "Set a number above 0 and below 1.",
    ),
    (
        "greedy answers many times",
        (
            ("buffer.explorer_input.eval_tasksets[].path", "held.jsonl"),
            ("buffer.explorer_input.eval_tasksets[].repeat_times", 4),
            ("buffer.explorer_input.eval_tasksets[].rollout_args.temperature", 0.0),
        ),
        "buffer.explorer_input.eval_tasksets[0].repeat_times",
        "greedy replies are all the same",
    ),
    (
        "an unknown operator",
        (("data_processor.experience_pipeline.operators", [{"name": "reward_filte"}]),),
        "data_processor.experience_pipeline.operators[0].name",
        "Did you mean 'reward_filter'?",
    ),
    (
        "an operator that is not here",
        (("data_processor.experience_pipeline.operators", [{"name": "data_juicer"}]),),
        "data_processor.experience_pipeline.operators[0].name",
        "Score replies by rewards of your own.",
    ),
    ("an unknown monitor", (("monitor.monitor_type", "wanb"),), "monitor.monitor_type", "Did you mean 'wandb'?"),
    ("a monitor that is not served", (("monitor.monitor_type", "swanlab"),), "monitor.monitor_type", "WANDB_MODE"),
    (
        "a secret in a file",
        (("monitor", {"monitor_type": "wandb", "monitor_args": {"api_key": "x"}}),),
        "monitor.monitor_args.api_key",
        "WANDB_API_KEY",
    ),
    ("a word for a number", (("buffer.batch_size", "abc"),), "buffer.batch_size", "(got 'abc')"),
    ("an unknown key", (("model.tinker.rnk", 8),), "model.tinker.rnk", "Did you mean 'model.tinker.rank'?"),
    ("an unknown section", (("modell", {}),), "modell", "Did you mean 'model'?"),
]


@pytest.mark.parametrize(("pairs", "key", "fix"), [fault[1:] for fault in FAULTS], ids=[c[0] for c in FAULTS])
def test_fault_names_its_key_and_fix(pairs: Pairs, key: str, fix: str, tmp_path: Path):
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, *pairs)
    lines = [line for line in str(refusal.value).splitlines() if fix in line]
    assert lines, str(refusal.value)
    assert f"'{key}'" in lines[0] or key in lines[0]
    assert "file.yaml" in lines[0]


def test_files_only_trinity_refuses_are_accepted(tmp_path: Path):
    ppo = read(tmp_path, ("algorithm.algorithm_type", "ppo"), ("model.critic_model_path", "tiny")).settings
    assert ppo.algorithm.critic is not None
    style, held = (
        ("synchronizer.sync_style", "fully_async"),
        ("buffer.explorer_input.eval_tasksets[].path", "held.jsonl"),
    )
    assert read(tmp_path, style, held).settings.evaluates


def test_all_faults_are_reported_together(tmp_path: Path):
    values: dict[str, Any] = with_key(with_key(SMALL, "mode", "serve"), "model.max_model_len", 70)
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, ("synchronizer.sync_interval", 0), values=values)
    assert len(str(refusal.value).splitlines()) >= 3


def test_unset_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NOPE", raising=False)
    with pytest.raises(ConfigError, match="NOPE"):
        read(tmp_path, ("name", "${oc.env:NOPE}"))


def test_references_resolve_to_values_and_defaults(tmp_path: Path):
    settings = read(tmp_path, ("group", "${model.model_path}-${mode}-${explorer.rollout_model.seed}")).settings
    assert settings.folder == "out/Trinity-RFT/tiny-both-42/small"
