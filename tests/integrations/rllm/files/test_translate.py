"""What the keys of rLLM become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.rllm.files.test_config import DOCUMENTED
from tinsmith.dialects.base import Translation
from tinsmith.integrations.rllm.files import read_config, roles, translate
from tinsmith.rl.config import RunConfig
from tinsmith.settings import build

LAUNCHED = [
    "model.name=Qwen/Qwen3-4B-Instruct-2507",
    "model.lora_rank=32",
    "training.group_size=4",
    "training.learning_rate=4e-5",
    "sampling.temperature=1.0",
    "sampling.top_p=1.0",
    "algorithm.adv_estimator=grpo",
    "algorithm.norm_adv_by_std_in_grpo=true",
    "algorithm.grouping_level=trajectory",
    "data.max_prompt_length=2048",
    "data.max_response_length=1024",
    "data.train_batch_size=64",
    "data.val_batch_size=512",
    "trainer.total_epochs=100",
    "trainer.logger=[wandb]",
    "trainer.val_before_train=False",
    "trainer.test_freq=10",
    "trainer.save_freq=20",
]
"""The launch script of rLLM's solver-judge example."""
UNIFIED = "rllm/backend=tinker"
NO_EFFECT = "it has an effect only with"


def of(*overrides: str) -> Translation:
    """The translation of rLLM's defaults with overrides."""
    return translate(read_config({}, overrides))


def at(result: Translation, key: str) -> Any:
    """The value at a dotted key of the settings; ... if there is none."""
    value: Any = result.settings
    for part in key.split("."):
        if part not in value:
            return ...
        value = value[part]
    return value


def check(overrides: Sequence[str], expected: dict[str, Any]) -> Translation:
    """The translation, which has these values and is valid with tasks and rewards."""
    result = of(*overrides)
    assert result.faults == ()
    assert {key: at(result, key) for key in expected} == expected
    own = {"tasks": {"train": {"type": "addition"}, "eval": {"type": "largest"}}, "rewards": [{"type": "number"}]}
    build(RunConfig, {**{key: value for key, value in result.settings.items() if key != "workflow"}, **own}, "here")
    return result


def test_launch_script_of_the_example():
    result = check(
        LAUNCHED,
        {
            "model.name": "Qwen/Qwen3-4B-Instruct-2507",
            "model.rank": 32,
            "group_size": 4,
            "groups_per_step": 64,
            "optimizer.learning_rate": 4e-5,
            "sampling.temperature": 1.0,
            "sampling.top_p": 1.0,
            "sampling.max_prompt_tokens": 2048,
            "sampling.max_tokens": 1024,
            "algorithm.advantage": {"type": "grpo", "normalize": "group", "std": "population", "std_threshold": None},
            "algorithm.loss": {"type": "importance_sampling"},
            "algorithm.grouping": "role",
            "algorithm.aggregate": "token_sum",
            "epochs": 100,
            "steps": ...,
            "monitors": [{"type": "report"}, {"type": "wandb", "project": "rllm-tinker", "name": "default"}],
            "eval.every": 10,
            "eval.before": False,
            "checkpoint.every": 20,
            "rollout.retries": 2,
            "rollout.split": 1,
            "folder": "runs/rllm-tinker/default",
            "model.base_url": ...,
            "workflow": ...,
            "tasks": ...,
        },
    )
    assert result.notes == (
        "data.val_batch_size: held-out tasks are evaluated together; rollout.concurrency bounds how many at a time.",
    )


def test_documented_command_line():
    name = "countdown-grpo-qwen3-8b"
    result = check(
        DOCUMENTED,
        {
            "model.rank": 16,
            "group_size": 8,
            "groups_per_step": 32,
            "epochs": 20,
            "name": name,
            "folder": f"runs/solver-judge-tinker/{name}",
            "monitors": [
                {"type": "console"},
                {"type": "report"},
                {"type": "wandb", "project": "solver-judge-tinker", "name": name},
            ],
            "sampling.temperature": 0.6,
            "sampling.top_p": 0.95,
            "eval.temperature": 0.6,
            "algorithm.old_logprobs": "recomputed",
        },
    )
    assert len(result.notes) == 1
    defaults = "sampling.temperature 0.6 and sampling.top_p 0.95, by rLLM's defaults: "
    assert result.notes[0].startswith(defaults)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["tinker_base_url=http://here"], {"model.base_url": "http://here"}),
        (["model.train_unembed=false"], {"model.train_unembed": False}),
        (["training.beta1=0.8"], {"optimizer.beta1": 0.8}),
        (["val_sampling.temperature=0.3"], {"eval.temperature": 0.3, "sampling.temperature": 0.6}),
        (["val_sampling.max_tokens=9"], {"eval.max_tokens": 9, "sampling.max_tokens": 2048}),
        (["training.val_group_size=4"], {"eval.num_samples": 4}),
        (["algorithm.adv_estimator=REINFORCE"], {"algorithm.advantage": {"type": "reinforce"}}),
        (["algorithm.adv_estimator=rloo"], {"algorithm.advantage": {"type": "rloo"}}),
        (
            ["algorithm.adv_estimator=gae", "algorithm.gamma=0.9"],
            {
                "algorithm.type": "ppo",
                "algorithm.advantage": {"type": "gae", "gamma": 0.9, "lam": 0.95},
                "algorithm.critic": {},
            },
        ),
        (
            ["algorithm.adv_estimator=reinforce_plus_plus"],
            {"algorithm.advantage": {"type": "reinforceplusplus", "gamma": 1.0}},
        ),
        (
            [
                "algorithm.adv_estimator=distill",
                "algorithm.teacher_rollout_args.backend=tinker",
                "algorithm.teacher_rollout_args.model=large",
            ],
            {"algorithm.advantage": {"type": "on_policy_distill"}, "algorithm.teacher": "large"},
        ),
        (["algorithm.grouping_level=step"], {"algorithm.grouping": "turn", "algorithm.turn_discount": ...}),
        (["algorithm.grouping_level=step", "algorithm.gamma=0.9"], {"algorithm.turn_discount": 0.9}),
        (["algorithm.grouping_level=episode"], {"algorithm.grouping": "rollout"}),
        (["algorithm.remove_constant_reward_groups=true"], {"filters": [{"type": "reward_std"}]}),
        (["workflow.n_parallel_tasks=9"], {"rollout.concurrency": 9}),
        (["workflow.retry_limit=1"], {"rollout.retries": 0}),
        (
            ["workflow.path=a.b:C", "workflow.args={n: 2}"],
            {"workflow": {"type": "custom", "path": "a.b:C", "args": {"n": 2}}},
        ),
        (["rollout_engine.disable_thinking=true"], {"model.chat_template_values": {"enable_thinking": False}}),
        (["rollout_engine.reasoning_effort=high"], {"model.chat_template_values": {"reasoning_effort": "high"}}),
        (
            ["rollout_engine.renderer_name=qwen3_disable_thinking"],
            {"model.chat_template_values": {"enable_thinking": False}},
        ),
        (["trainer.test_freq=-1"], {"eval.every": 0, "eval.after": False}),
        (["trainer.save_freq=-1"], {"checkpoint.every": 0}),
        (["trainer.default_local_dir=/out"], {"folder": "/out"}),
        (["trainer.resume_from_tinker_id=tinker://a/weights/000060"], {"resume_from": "tinker://a/weights/000060"}),
        (["training.max_length=3000"], {"sampling.max_tokens": 2048, "sampling.max_total_tokens": 3000}),
        (["trainer.logger=tensorboard"], {"monitors": [{"type": "report"}, {"type": "tensorboard"}]}),
        (["data.train_files=a.parquet"], {"tasks.train.path": "a.parquet", "tasks.train.answer": "{ground_truth}"}),
        (["data.val_files=b.jsonl"], {"tasks.eval.path": "b.jsonl"}),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_seed_key_becomes_a_setting(overrides: list[str], expected: dict[str, Any]):
    check(overrides, expected)


GRPO = {"type": "grpo", "normalize": "group", "std": "population", "std_threshold": None}
SIZE = {"type": "group_size", "least": 2}
REASONS = ["max_prompt", "max_response", "max_turns", "timeout", "error"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"algorithm.advantage": GRPO, "resume": True, "folder": "checkpoints/rllm-training/default"}),
        ([], {"algorithm.loss": {"type": "ppo", "dual_clip": None, "clip_low": 0.2, "clip_high": 0.2}}),
        (["rllm.algorithm.eps_clip=0.1", "rllm.algorithm.eps_clip_high=0.3"], {"algorithm.loss.clip_low": 0.1}),
        (["rllm.algorithm.eps_clip_high=0.3"], {"algorithm.loss.clip_high": 0.3}),
        (["rllm.algorithm.loss_fn=cispo"], {"algorithm.loss": {"type": "cispo", "clip_low": 0.2, "clip_high": 0.2}}),
        (["rllm.algorithm.loss_fn=cross_entropy"], {"algorithm.loss": {"type": "opmd"}}),
        (["rllm.algorithm.adv_estimator=rloo"], {"algorithm.loss": {"type": "importance_sampling"}}),
        (["rllm.algorithm.adv_estimator=prpo"], {"algorithm.advantage": {"type": "prpo"}}),
        (["rllm.algorithm.loss_agg_mode=token-mean"], {"algorithm.aggregate": "token_mean"}),
        (["rllm.algorithm.kl_beta=0.01"], {"algorithm.kl": {"type": "k2", "coef": 0.01}}),
        (
            ["rllm.algorithm.rollout_correction.tis_mode=sequence", "rllm.algorithm.rollout_correction.tis_cap=3"],
            {"algorithm.correction": {"type": "tis", "level": "sequence", "cap": 3}},
        ),
        (
            ["rllm.algorithm.rollout_correction.bypass_mode=false"],
            {"algorithm.correction": {"type": "proximal"}},
        ),
        (["rllm.algorithm.use_precomputed_advantage=true"], {"algorithm.advantage": {"type": "precomputed"}}),
        (["rllm.mask_truncated_samples=true"], {"algorithm.mask_truncated": True}),
        (["rllm.agent.overlong_filter=true"], {"algorithm.mask_truncated": True}),
        (
            ["rllm.stepwise_advantage.enable=true", "rllm.stepwise_advantage.mode=per_step"],
            {"algorithm.grouping": "turn"},
        ),
        (
            ["rllm.stepwise_advantage.enable=true", "rllm.stepwise_advantage.normalize_by_steps=true"],
            {"algorithm.advantage": {**GRPO, "type": "step_wise_grpo", "by_turns": True}},
        ),
        ([], {"filters": [SIZE], "filter_refills": ..., "min_partial_groups": ...}),
        (["rllm.rejection_sample.min_trajs_per_group=1"], {"filters": ...}),
        (["rllm.rejection_sample.min_trajs_per_group=3"], {"filters": [{"type": "group_size", "least": 3}]}),
        (["rllm.rejection_sample.filter_uniform_groups=true"], {"filters": [SIZE, {"type": "reward_std"}]}),
        (["training.group_size=1"], {"filters": ...}),
        (["rllm.compact_filtering.enable=true"], {"filters": [{"type": "termination", "reasons": REASONS}, SIZE]}),
        (["rllm.rejection_sample.enable=true"], {"filter_refills": 10, "min_partial_groups": 1}),
        (["rllm.rejection_sample.enable=true", "rllm.rejection_sample.multiplier=20"], {"filter_refills": 19}),
        (
            ["rllm.rejection_sample.enable=true", "rllm.rejection_sample.min_partial_solve_tasks=64"],
            {"min_partial_groups": 64},
        ),
        (["rllm.algorithm.lr_schedule=linear"], {"optimizer.schedule": "linear"}),
        (["training.lr_schedule=cosine"], {"optimizer.schedule": "cosine"}),
        (["training.warmup_steps_ratio=0.1"], {"optimizer.warmup_ratio": 0.1, "optimizer.warmup_steps": ...}),
        (["rllm.algorithm.warmup_steps=7"], {"optimizer.warmup_steps": 7}),
        (["rllm.trainer.total_batches=100"], {"steps": 100, "epochs": 10}),
        (["rllm.trainer.val_only=true"], {"mode": "bench"}),
        (
            ["rllm.trainer.val_only=true", "training.resume_from_tinker_id=tinker://a/weights/1"],
            {"bench": {"checkpoints": ["tinker://a/weights/1"], "base": False}, "resume_from": ...},
        ),
        (["training.resume_mode=disable"], {"resume": "rename"}),
        (["training.default_local_dir=out"], {"folder": "out"}),
        (["rllm.data.seed=3"], {"seed": 3}),
        (["rllm.rollout.train.max_tokens=50"], {"sampling.max_tokens": 50}),
        (["rllm.rollout.train.top_k=5"], {"sampling.top_k": 5, "algorithm.old_logprobs": "recomputed"}),
        (["rllm.rollout.val.temperature=0.6"], {"eval.temperature": 0.6, "sampling.temperature": 1.0}),
        (["sampling.val.top_p=0.9"], {"eval.top_p": 0.9}),
        (["sampling.train.temperature=0.7"], {"sampling.temperature": 0.7, "algorithm.old_logprobs": ...}),
        (["trainer.total_epochs=3"], {"epochs": 3}),
        (["rllm.workflow.workflow_args.timeout=60"], {"rollout.timeout": 60}),
        (["rllm.agent.trajectory_timeout=70"], {"rollout.timeout": 70}),
        (["rllm.disable_thinking=true"], {"model.chat_template_values": {"enable_thinking": False}}),
        (
            ["rllm.async_training.enable=true", "rllm.async_training.staleness_threshold=0.5"],
            {"groups_per_step": 64, "staleness": 1, "sync": {"interval": 1}},
        ),
        (
            [
                "rllm.async_training.enable=true",
                "rllm.async_training.mini_batch_size=16",
                "rllm.async_training.trigger_parameter_sync_step=2",
                "rllm.async_training.staleness_threshold=1",
                "rllm.async_training.partial_rollout=true",
            ],
            {"groups_per_step": 16, "staleness": ..., "sync.style": "live", "sync.publish_every": 2},
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and value else "",
)
def test_unified_key_becomes_a_setting(overrides: list[str], expected: dict[str, Any]):
    check([UNIFIED, *overrides], expected)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("algorithm.gamma=0.9", "algorithm.gamma: grpo does not discount"),
        ("training.group_size=1", "training.group_size: a role with one trajectory in a group has no baseline"),
        ("rollout_engine.renderer_name=role_colon", "the chat template of the model is used"),
        ("algorithm.shared_tokenizer=true", f"algorithm.shared_tokenizer: {NO_EFFECT} adv_estimator distill"),
        ("trainer.logger=[file,ui]", "ui: see report.html in the run folder"),
        ("workflow.args={n: 2}", "workflow.args: it has an effect only with workflow.path"),
        ("rllm.async_training.staleness_threshold=1", "it has an effect only with enable: true"),
        ("rllm.compact_filtering.mask_timeout=false", f"{NO_EFFECT} rllm.compact_filtering.enable: true"),
        ("rllm.rejection_sample.multiplier=2", f"{NO_EFFECT} rllm.rejection_sample.enable: true"),
        ("rllm.stepwise_advantage.normalize_by_steps=true", f"{NO_EFFECT} rllm.stepwise_advantage.enable: true"),
        ("rllm.algorithm.rollout_correction.tis_cap=3", f"{NO_EFFECT} rllm.algorithm.rollout_correction.tis_mode"),
        ("training.max_length=2500", "prompt and reply have at most 2500 tokens"),
    ],
)
def test_key_without_effect_is_noted(override: str, text: str):
    result = of(*([UNIFIED] if override.startswith("rllm") else []), override)
    assert [entry for entry in result.notes if text in entry], result.notes
    assert result.faults == ()


def test_clip_of_a_loss_that_does_not_clip_is_noted():
    result = of(UNIFIED, "rllm.algorithm.loss_fn=importance_sampling", "rllm.algorithm.eps_clip=0.1")
    assert result.notes == (
        "rllm.algorithm.eps_clip: the loss importance_sampling does not clip; set rllm.algorithm.loss_fn: ppo.",
    )


@pytest.mark.parametrize(
    ("override", "key", "fix"),
    [
        ("algorithm.adv_estimator=grop", "algorithm.adv_estimator", "Did you mean 'grpo'?"),
        ("algorithm.adv_estimator=echo", "algorithm.adv_estimator", "Use grpo."),
        ("algorithm.adv_estimator=distill", "algorithm.teacher_rollout_args.backend", "set backend: tinker"),
        ("algorithm.grouping_level=steps", "algorithm.grouping_level", "Did you mean 'step'?"),
        ("training.group_size=0", "training.group_size", "Set 1 or more."),
        ("training.num_minibatches=4", "training.num_minibatches", "Set 1"),
        ("training.max_length=1", "training.max_length", "Raise it."),
        ("trainer.total_epochs=0", "trainer.total_epochs", "Set more than 0."),
        ("trainer.logger=[clearml]", "trainer.logger", "Use wandb, mlflow, tensorboard or trackio."),
        ("trainer.logger=[wandbb]", "trainer.logger", "Did you mean 'wandb'?"),
        ("trainer.resume_from_tinker_id=/a", "trainer.resume_from_tinker_id", "tinker://RUN/weights/NAME"),
        ("rllm.agent.agent_args={a: 1}", "rllm.agent.agent_args", "workflow_args"),
        ("rllm/backend=verl", "rllm.backend", "rllm/backend=tinker"),
        ("rllm.algorithm.loss_fn=pppo", "rllm.algorithm.loss_fn", "Did you mean 'ppo'?"),
        ("rllm.algorithm.loss_agg_mode=mean", "rllm.algorithm.loss_agg_mode", "token-mean"),
        ("rllm.algorithm.lr_schedule=cosin", "rllm.algorithm.lr_schedule", "Did you mean 'cosine'?"),
        ("rllm.algorithm.kl_beta=-1", "rllm.algorithm.kl_beta", "Set 0 or more."),
        ("rllm.algorithm.router_replay=R2", "rllm.algorithm.router_replay", "Use R3"),
        ("rllm.algorithm.rollout_correction.tis_mode=group", "rollout_correction.tis_mode", "token or sequence"),
        ("rllm.remote_runtime.enabled=true", "rllm.remote_runtime.enabled", "Leave it out."),
        ("training.resume_mode=resume_path", "training.resume_from_path", "training.resume_mode: auto"),
    ],
)
def test_fault_names_the_key_and_what_to_do(override: str, key: str, fix: str):
    unified = override.startswith("rllm") or "resume_mode" in override
    faults = of(*([UNIFIED] if unified else []), override).faults
    assert len(faults) == 1
    assert faults[0].startswith("'")
    assert f"{key}'" in faults[0]
    assert fix in faults[0]


def test_checkpoint_folder_of_rllm_is_resumed_from(tmp_path: Path):
    paths = {"state_path": "tinker://a/weights/7", "sampler_path": "tinker://a/sampler_weights/7"}
    (tmp_path / "checkpoint.json").write_text(json.dumps({"name": "7", **paths}))
    check(
        ["rllm/backend=tinker", "training.resume_mode=resume_path", f"training.resume_from_path={tmp_path}"],
        {"resume_from": "tinker://a/weights/7"},
    )
    faults = of(UNIFIED, "training.resume_mode=resume_path", f"training.resume_from_path={tmp_path}/no").faults
    assert "there is no checkpoint" in faults[0]


def test_conflicting_places_are_noted():
    result = translate({"rllm": {"data": {"max_prompt_length": 3}}, "data": {"max_prompt_length": 4}})
    assert "data.max_prompt_length: rllm.data.max_prompt_length is set as well, and is used." in result.notes


def test_registered_estimator_is_used():
    config = read_config({}, [UNIFIED, "rllm.algorithm.adv_estimator=mine"])
    assert "there is no estimator 'mine'" in translate(config).faults[0]
    result = translate(config, {"mine": {"type": "rloo"}})
    assert at(result, "algorithm.advantage") == {"type": "rloo"}


def test_estimators_of_roles_become_advantages():
    config = read_config({}, [UNIFIED])
    result = roles(config, {"solver": "rloo", "judge": ("reinforce", "ppo")})
    assert at(result, "algorithm.roles.solver.advantage") == {"type": "rloo"}
    assert at(result, "algorithm.roles.judge.advantage") == {"type": "reinforce"}
    assert "the loss of this run is ppo" in roles(config, {"judge": ("reinforce", "importance_sampling")}).faults[0]
