"""For every copied or translated key: a value other than the default, and the keys that must be set with it."""

from __future__ import annotations

from typing import Any

Pairs = tuple[tuple[str, Any], ...]

TASKSET = "buffer.explorer_input.taskset"
TASKSETS = "buffer.explorer_input.tasksets[]"
EVAL = "buffer.explorer_input.eval_tasksets[]"
LORA = "model.lora_configs[]"
NO_TINKER: Pairs = (("model.tinker.enable", False), (f"{LORA}.lora_rank", 16))
ONE_LIST: Pairs = (("buffer.explorer_input.taskset", None), (f"{TASKSETS}.path", "tasks.jsonl"))
MIXES: Pairs = (
    ("buffer.trainer_input.auxiliary_buffers.sft_dataset.path", "chats.jsonl"),
    ("buffer.train_batch_size", 32),
    ("algorithm.algorithm_type", "mix"),
)
EVALUATED: Pairs = ((f"{EVAL}.path", "held.jsonl"),)
AUXILIARY = "explorer.auxiliary_models[]"

ELSEWHERE = f"{AUXILIARY}.external_model_config"
JUDGED: Pairs = (
    ("buffer.explorer_input.default_workflow_type", "math_rm_workflow"),
    (f"{AUXILIARY}.model_path", "judge"),
)

LIVE: Pairs = (("synchronizer.sync_style", "fully_async"),)

OPERATOR = "data_processor.experience_pipeline.operators[]"

EXAMPLES: dict[str, tuple[Any, Pairs]] = {
    "algorithm.enable_router_replay": (True, ()),
    "algorithm.rollout_correction": ({"rollout_is": "token"}, ()),
    "stages": ([{"stage_name": "one"}, {"stage_name": "two", "algorithm": {"algorithm_type": "rloo"}}], ()),
    f"{OPERATOR}.name": ("mask_response_truncated", ((f"{OPERATOR}.name", "invalid_reward_filter"),)),
    f"{OPERATOR}.args": ({"threshold": 0.5}, ((f"{OPERATOR}.name", "reward_filter"),)),
    "monitor.monitor_type": ("wandb", ()),
    "monitor.monitor_args": ({"base_url": "http://here"}, (("monitor.monitor_type", "wandb"),)),
    "buffer.explorer_input.default_workflow_type": ("math_boxed_workflow", ()),
    "buffer.explorer_input.default_reward_fn_type": ("countdown_reward", ()),
    "mode": ("explore", ()),
    "log.level": ("debug", ()),
    "project": ("mine", ()),
    "group": ("these", ()),
    "name": ("another", ()),
    "checkpoint_root_dir": ("elsewhere", ()),
    "continue_from_checkpoint": (False, ()),
    "algorithm.algorithm_type": ("rloo", ()),
    "algorithm.sample_strategy_args": ({"expert_data_ratio": 0.25}, MIXES),
    "algorithm.repeat_times": (2, ()),
    "algorithm.optimizer.lr": ("1e-5", ()),
    "algorithm.optimizer.lr_warmup_steps": (2, ()),
    "algorithm.optimizer.lr_warmup_steps_ratio": (0.1, ()),
    "algorithm.optimizer.min_lr_ratio": (0.2, (("algorithm.optimizer.lr_scheduler_type", "linear"),)),
    "algorithm.optimizer.warmup_style": ("cosine", ()),
    "algorithm.optimizer.lr_scheduler_type": ("cosine", ()),
    "algorithm.optimizer.betas": ([0.8, 0.9], ()),
    "algorithm.optimizer.weight_decay": (0.0, ()),
    "algorithm.advantage_fn": ("rloo", ()),
    "algorithm.advantage_fn_args": ({"std_threshold": 0.0}, ()),
    "algorithm.kl_penalty_fn": ("k1", ()),
    "algorithm.kl_penalty_fn_args": ({"kl_coef": 0.5}, (("algorithm.kl_penalty_fn", "k1"),)),
    "algorithm.policy_loss_fn": ("cispo", ()),
    "algorithm.policy_loss_fn_args": ({"clip_range_high": 0.3}, ()),
    "algorithm.kl_loss_fn": ("k3", ()),
    "algorithm.kl_loss_fn_args": ({"kl_coef": 0.0}, ()),
    "algorithm.entropy_loss_fn": ("none", (("algorithm.entropy_loss_fn_args", {"entropy_coef": 0.1}),)),
    "algorithm.entropy_loss_fn_args": ({"entropy_coef": 0.1}, ()),
    "algorithm.loss_agg_mode": ("seq-mean-token-sum", ()),
    "model.model_path": ("other", ()),
    "model.custom_chat_template": ("{{ messages }}", ()),
    "model.chat_template_path": ("template.jinja", ()),
    "model.temperature": (0.7, ()),
    "model.top_p": (0.9, ()),
    "model.top_k": (20, ()),
    "model.max_model_len": (100, (("model.max_response_tokens", None), ("model.max_model_len", 80))),
    "model.max_prompt_tokens": (32, ()),
    "model.max_response_tokens": (8, ()),
    "model.enable_thinking": (False, ()),
    "model.lora_configs[].lora_rank": (8, NO_TINKER),
    "model.lora_configs[].path": ("tinker://a/weights/b", NO_TINKER),
    "model.tinker.enable": (False, ((f"{LORA}.lora_rank", 16),)),
    "model.tinker.rank": (8, ()),
    "model.tinker.seed": (7, ()),
    "model.tinker.train_mlp": (False, ()),
    "model.tinker.train_attn": (False, ()),
    "model.tinker.train_unembed": (False, ()),
    "model.tinker.base_url": ("http://127.0.0.1:9", ()),
    "model.tinker.base_model": ("other", ()),
    "buffer.batch_size": (8, ()),
    "buffer.train_batch_size": (8, ()),
    "buffer.total_epochs": (2, (("buffer.total_steps", None),)),
    "buffer.total_steps": (5, ()),
    "explorer.name": ("b_2", (("mode", "explore"),)),
    "explorer.rollout_model.engine_num": (3, ()),
    "explorer.rollout_model.dtype": ("float32", NO_TINKER),
    "explorer.rollout_model.seed": (7, ()),
    "explorer.rollout_model.max_model_len": (
        100,
        (("model.max_response_tokens", None), ("model.max_model_len", 80)),
    ),
    "explorer.rollout_model.max_prompt_tokens": (32, ()),
    "explorer.rollout_model.max_response_tokens": (8, ()),
    "explorer.rollout_model.chat_template": ("{{ messages }}", ()),
    "explorer.rollout_model.ignore_eos": (True, ()),
    "explorer.runner_per_model": (3, ()),
    "explorer.eval_interval": (7, EVALUATED),
    "explorer.eval_on_startup": (False, EVALUATED),
    "trainer.save_interval": (5, ()),
    "trainer.trainer_config": ({"actor_rollout_ref": {"actor": {"ppo_epochs": 2}}}, NO_TINKER),
    "algorithm.bypass_old_logprobs": (False, NO_TINKER),
    "trainer.max_checkpoints_to_keep": (2, ()),
    "trainer.total_steps": (2, ()),
    "trainer.grad_clip": (0.5, ()),
    "trainer.critic_warmup": (2, (("algorithm.algorithm_type", "ppo"),)),
    "synchronizer.sync_offset": (1, ()),
    "synchronizer.sync_method": ("checkpoint", ()),
    "synchronizer.sync_style": ("Dynamic_By_Explorer", ()),
    "synchronizer.sync_interval": (2, ()),
    "synchronizer.explorer_sync_interval": (2, LIVE),
    "synchronizer.trainer_sync_interval": (2, LIVE),
    "synchronizer.sync_timeout": (60, ()),
    "explorer.max_inflight_batches": (3, LIVE),
    "explorer.max_timeout": (60, ()),
    "explorer.max_retry_times": (0, ()),
    "explorer.max_repeat_times_per_runner": (1, ()),
    "explorer.over_rollout.ratio": (0.5, LIVE),
    "explorer.over_rollout.wait_after_min": (5, (*LIVE, ("explorer.over_rollout.ratio", 0.5))),
    "explorer.over_rollout.return_partial_tasks": (True, LIVE),
    "explorer.dynamic_timeout.enable": (True, ()),
    "explorer.dynamic_timeout.warmup_min_steps": (3, (("explorer.dynamic_timeout.enable", True),)),
    "explorer.dynamic_timeout.ratio": (5.0, (("explorer.dynamic_timeout.enable", True),)),
    f"{AUXILIARY}.model_path": ("teacher", (("algorithm.algorithm_type", "jsd"), (f"{AUXILIARY}.model_path", "one"))),
    f"{AUXILIARY}.max_response_tokens": (9, JUDGED),
    f"{AUXILIARY}.enable_thinking": (False, JUDGED),
    f"{ELSEWHERE}.enable": (True, (*JUDGED, (f"{ELSEWHERE}.base_url_env", "PATH"))),
    f"{ELSEWHERE}.base_url_env": (
        "HOME",
        (*JUDGED, (f"{ELSEWHERE}.enable", True), (f"{ELSEWHERE}.base_url_env", "PATH")),
    ),
    f"{ELSEWHERE}.api_key_env": (
        "SOME",
        (*JUDGED, (f"{ELSEWHERE}.enable", True), (f"{ELSEWHERE}.base_url_env", "PATH")),
    ),
    f"{ELSEWHERE}.model_name": (
        "some",
        (*JUDGED, (f"{ELSEWHERE}.enable", True), (f"{ELSEWHERE}.base_url_env", "PATH")),
    ),
    "explorer.bench_on_latest_checkpoint": (True, (*EVALUATED, ("mode", "bench"))),
    "explorer.rollout_model.enable_thinking": (False, ()),
    "buffer.explorer_input.default_eval_workflow_type": ("math_boxed_workflow", EVALUATED),
    f"{EVAL}.default_workflow_type": ("math_boxed_workflow", EVALUATED),
    f"{EVAL}.rollout_args.top_p": (0.5, EVALUATED),
    f"{EVAL}.rollout_args.top_k": (5, EVALUATED),
    f"{EVAL}.repeat_times": (4, EVALUATED),
    f"{EVAL}.default_reward_fn_type": ("accuracy_reward", EVALUATED),
}
"""By key. Keys of tasksets are added below, for each place of a taskset."""

_TASKSET: dict[str, tuple[Any, Pairs]] = {
    "path": ("other/data", ()),
    "split": ("test", ()),
    "subset_name": ("main", ()),
    "storage_type": ("sql", (("name", "rows"),)),
    "format.prompt_key": ("question", ()),
    "format.response_key": ("answer", ()),
    "format.system_prompt": ("Be brief.", ()),
    "format.system_prompt_key": ("system", ()),
    "format.reply_prefix": ("<think>", ()),
    "format.image_key": ("images", ()),
    "format.enable_thinking": (True, ()),
    "format.chat_template": ("{{ messages }}", ()),
    "rollout_args.temperature": (0.5, ()),
    "rollout_args.max_tokens": (4, ()),
    "workflow_args": ({"with_think": True}, (("default_workflow_type", "math_boxed_workflow"),)),
    "reward_fn_args": ({"pattern": "yes"}, (("default_reward_fn_type", "format_reward"),)),
}
_TRAINED: dict[str, tuple[Any, Pairs]] = {
    "default_workflow_type": ("math_boxed_workflow", ()),
    "default_reward_fn_type": ("countdown_reward", ()),
    "rollout_args.top_p": (0.5, ()),
    "rollout_args.top_k": (5, ()),
    **{
        f"{selector}.{key}": example
        for selector in ("data_selector", "task_selector")
        for key, example in {
            "selector_type": ("shuffle", ()),
            "feature_keys": (
                ["level"],
                ((f"{selector}.selector_type", "offline_easy2hard"), (f"{selector}.feature_keys", ["other"])),
            ),
            "kwargs": (
                {"descending": True},
                ((f"{selector}.selector_type", "offline_easy2hard"), (f"{selector}.feature_keys", ["level"])),
            ),
        }.items()
    },
}


def _at(place: str, examples: dict[str, tuple[Any, Pairs]], beside: Pairs) -> dict[str, tuple[Any, Pairs]]:
    return {
        f"{place}.{key}": (value, (*beside, *((f"{place}.{name}", entry) for name, entry in more)))
        for key, (value, more) in examples.items()
    }


EXAMPLES |= _at(TASKSET, {**_TASKSET, **_TRAINED}, ())
EXAMPLES |= _at(TASKSETS, {**_TASKSET, **_TRAINED}, (*ONE_LIST, (f"{TASKSETS}.path", "some/data")))
EXAMPLES |= _at(EVAL, _TASKSET, ((f"{EVAL}.path", "some/data"),))

_BUFFER: dict[str, tuple[Any, Pairs]] = {
    "path": ("other.jsonl", ()),
    "split": ("test", (("path", "some/data"),)),
    "subset_name": ("main", (("path", "some/data"),)),
    "storage_type": ("sql", (("name", "rows"),)),
    "format.prompt_type": ("plaintext", ()),
    "format.prompt_key": ("question", (("format.prompt_type", "plaintext"),)),
    "format.response_key": ("answer", (("format.prompt_type", "plaintext"),)),
    "format.messages_key": ("chat", ()),
    "format.system_prompt": ("Be brief.", ()),
    "format.system_prompt_key": ("system", ()),
    "format.tools_key": ("functions", ()),
    "format.enable_concatenated_multi_turn": (True, ()),
    "format.enable_thinking": (True, ()),
    "format.chat_template": ("{{ messages }}", ()),
    **{f"data_selector.{key}": _TRAINED[f"data_selector.{key}"] for key in ("selector_type", "feature_keys", "kwargs")},
}
OWN, OTHER = "buffer.trainer_input.experience_buffer", "buffer.trainer_input.auxiliary_buffers.*"
LEARNS: Pairs = (
    ("mode", "train"),
    ("buffer.train_batch_size", 8),
    (f"{OWN}.storage_type", "file"),
    (f"{OWN}.path", "chats.jsonl"),
)
LEARNED: Pairs = (("mode", "train"), ("buffer.train_batch_size", 8))
BESIDE: Pairs = (
    ("algorithm.algorithm_type", "mix"),
    ("algorithm.sample_strategy_args", {"sft_dataset_name": "some"}),
    ("buffer.train_batch_size", 32),
    (f"{OTHER}.path", "chats.jsonl"),
)
EXAMPLES |= _at(OWN, _BUFFER, (*LEARNS, ("algorithm.algorithm_type", "sft")))
EXAMPLES |= _at(OTHER, _BUFFER, BESIDE)
for key in ("chosen_key", "rejected_key"):
    EXAMPLES[f"{OWN}.format.{key}"] = ("reply", (*LEARNS, ("algorithm.algorithm_type", "dpo")))

REPLAYED: Pairs = ((f"{OWN}.replay_buffer.enable", True),)
EXAMPLES |= {
    f"{OWN}.replay_buffer.enable": (True, ()),
    f"{OWN}.replay_buffer.priority_fn": ("decay_limit_randomization", REPLAYED),
    f"{OWN}.replay_buffer.reuse_cooldown_time": (5.0, REPLAYED),
    f"{OWN}.replay_buffer.priority_fn_args": ({"decay": 3.0}, REPLAYED),
    f"{OWN}.capacity": (5, LIVE),
    f"{OWN}.max_read_timeout": (60, LEARNED),
}

REFUSES: dict[str, tuple[Any, Pairs]] = {
    "model.critic_model_path": ("some", ()),
    "algorithm.sample_strategy": ("mix", ()),
    "model.lora_configs[].lora_alpha": (16, NO_TINKER),
    "model.lora_configs[].target_modules": ("q_proj", NO_TINKER),
}
"""Keys that support only their default."""

NOTED: dict[str, tuple[Any, Pairs]] = {
    f"{OTHER}.format.chosen_key": ("reply", BESIDE),
    f"{OTHER}.format.rejected_key": ("reply", BESIDE),
    f"{OTHER}.capacity": (5, BESIDE),
    f"{OTHER}.max_read_timeout": (60, BESIDE),
    f"{OTHER}.replay_buffer.enable": (True, BESIDE),
    f"{OTHER}.replay_buffer.priority_fn": ("some", BESIDE),
    f"{OTHER}.replay_buffer.reuse_cooldown_time": (5.0, BESIDE),
    f"{OTHER}.replay_buffer.priority_fn_args": ({"decay": 3.0}, BESIDE),
}
"""Keys that have no effect at this place of their section, with a note."""
