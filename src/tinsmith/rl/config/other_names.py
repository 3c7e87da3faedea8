"""Names of settings in other systems, and ours: for suggestions where a run file or the command line has such a name.

docs/reference/names.md is this table. A name is as that system writes it; `our_keys` are keys of RunConfig.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple


class OtherName(NamedTuple):
    """A setting of another system."""

    system: str
    name: str
    our_keys: tuple[str, ...]
    """Empty if we have no such setting."""
    remark: str = ""


def _names(system: str, *rows: tuple[str, str] | tuple[str, str, str]) -> Iterator[OtherName]:
    for name, keys, *remark in rows:
        yield OtherName(system, name, tuple(keys.split()), *remark)


OTHER_NAMES: Sequence[OtherName] = (
    *_names(
        "TRL",
        ("model_name_or_path", "model.name"),
        ("num_generations", "group_size"),
        ("per_device_train_batch_size", "groups_per_step", "groups_per_step counts tasks, not replies"),
        ("gradient_accumulation_steps", "updates.stream", "a step is one gradient, however it is divided"),
        ("generation_batch_size", "groups_per_step", "groups_per_step counts tasks, not replies"),
        ("steps_per_generation", "updates.minibatches"),
        ("num_iterations", "updates.epochs"),
        ("learning_rate", "optimizer.learning_rate"),
        ("lr_scheduler_type", "optimizer.schedule"),
        ("warmup_ratio", "optimizer.warmup_ratio"),
        ("warmup_steps", "optimizer.warmup_steps"),
        ("weight_decay", "optimizer.weight_decay"),
        ("adam_beta1", "optimizer.beta1"),
        ("adam_beta2", "optimizer.beta2"),
        ("adam_epsilon", "optimizer.eps"),
        ("max_grad_norm", "optimizer.grad_clip_norm"),
        ("max_steps", "steps"),
        ("num_train_epochs", "epochs"),
        ("max_prompt_length", "sampling.max_prompt_tokens"),
        ("max_completion_length", "sampling.max_tokens"),
        ("max_new_tokens", "sampling.max_tokens"),
        ("temperature", "sampling.temperature"),
        ("top_p", "sampling.top_p"),
        ("top_k", "sampling.top_k"),
        ("beta", "algorithm.kl.coef", "of dpo: algorithm.loss.beta"),
        ("epsilon", "algorithm.loss.clip_low algorithm.loss.clip_high"),
        ("epsilon_high", "algorithm.loss.clip_high"),
        ("delta", "algorithm.loss.dual_clip"),
        ("loss_type", "algorithm.loss.type algorithm.aggregate"),
        ("scale_rewards", "algorithm.advantage.normalize"),
        ("importance_sampling_level", "algorithm.loss.type", "gspo is the loss of whole sequences"),
        ("mask_truncated_completions", "algorithm.mask_truncated"),
        ("reward_funcs", "rewards"),
        ("reward_weights", "rewards.0.weight", "the weight of each reward"),
        ("train_dataset", "tasks.train"),
        ("eval_dataset", "tasks.eval"),
        ("dataset_name", "tasks.train.name", "of a source of type hub"),
        ("eval_steps", "eval.every"),
        ("save_steps", "checkpoint.every"),
        ("save_total_limit", "checkpoint.keep"),
        ("output_dir", "folder"),
        ("run_name", "name"),
        ("report_to", "monitors"),
        ("lora_r", "model.rank"),
        ("lora_alpha", "", "32, the constant of the Tinker API"),
        ("use_vllm", "", "the server decides how it samples"),
        ("vllm_mode", "", "the server decides how it samples"),
        ("bf16", "service.dtype"),
        ("fp16", "service.dtype"),
        ("gradient_checkpointing", "", "the server decides"),
        ("logging_steps", "", "each step is logged"),
        ("peft_config", "model.rank"),
        ("lora_dropout", ""),
        ("lora_target_modules", "model.train_attn model.train_mlp model.train_unembed"),
        ("min_p", ""),
        ("repetition_penalty", ""),
        ("top_entropy_quantile", ""),
    ),
    *_names(
        "verl",
        ("actor_rollout_ref.model.path", "model.name"),
        ("actor_rollout_ref.model.lora_rank", "model.rank"),
        ("actor_rollout_ref.rollout.n", "group_size"),
        ("actor_rollout_ref.rollout.temperature", "sampling.temperature"),
        ("actor_rollout_ref.rollout.top_p", "sampling.top_p"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.learning_rate"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "updates.minibatches", "a number of parts, not a size"),
        ("actor_rollout_ref.actor.ppo_epochs", "updates.epochs"),
        ("actor_rollout_ref.actor.clip_ratio", "algorithm.loss.clip_low algorithm.loss.clip_high"),
        ("actor_rollout_ref.actor.clip_ratio_low", "algorithm.loss.clip_low"),
        ("actor_rollout_ref.actor.clip_ratio_high", "algorithm.loss.clip_high"),
        ("actor_rollout_ref.actor.clip_ratio_c", "algorithm.loss.dual_clip"),
        ("actor_rollout_ref.actor.use_kl_loss", "algorithm.kl.type"),
        ("actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl.coef"),
        ("actor_rollout_ref.actor.kl_loss_type", "algorithm.kl.type"),
        ("actor_rollout_ref.actor.entropy_coeff", "algorithm.entropy.coef"),
        ("actor_rollout_ref.actor.loss_agg_mode", "algorithm.aggregate"),
        ("actor_rollout_ref.actor.grad_clip", "optimizer.grad_clip_norm"),
        ("algorithm.adv_estimator", "algorithm.advantage.type"),
        ("algorithm.use_kl_in_reward", "algorithm.kl_penalty.type"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty.coef"),
        ("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage.normalize"),
        ("algorithm.gamma", "algorithm.advantage.gamma"),
        ("algorithm.lam", "algorithm.advantage.lam"),
        ("data.train_files", "tasks.train.path"),
        ("data.val_files", "tasks.eval"),
        ("data.train_batch_size", "groups_per_step"),
        ("data.max_prompt_length", "sampling.max_prompt_tokens"),
        ("data.max_response_length", "sampling.max_tokens"),
        ("trainer.total_epochs", "epochs"),
        ("trainer.total_training_steps", "steps"),
        ("trainer.test_freq", "eval.every"),
        ("trainer.save_freq", "checkpoint.every"),
        ("trainer.val_before_train", "eval.before"),
        ("trainer.experiment_name", "name"),
        ("trainer.default_local_dir", "folder"),
        ("trainer.logger", "monitors"),
        ("trainer.n_gpus_per_node", "", "the server decides how many GPUs it uses"),
        ("trainer.nnodes", "", "the server decides how many machines it uses"),
        ("custom_reward_function.path", "rewards", "a reward of type custom"),
    ),
    *_names(
        "OpenRLHF",
        ("pretrain", "model.name"),
        ("n_samples_per_prompt", "group_size"),
        ("rollout_batch_size", "groups_per_step"),
        ("train_batch_size", "updates.minibatches", "a number of parts, not a size"),
        ("actor_learning_rate", "optimizer.learning_rate"),
        ("init_kl_coef", "algorithm.kl_penalty.coef"),
        ("eps_clip", "algorithm.loss.clip_low algorithm.loss.clip_high"),
        ("advantage_estimator", "algorithm.advantage.type"),
        ("num_episodes", "epochs"),
        ("max_epochs", "updates.epochs"),
        ("prompt_max_len", "sampling.max_prompt_tokens"),
        ("generate_max_len", "sampling.max_tokens"),
        ("prompt_data", "tasks.train.path"),
        ("save_path", "folder"),
    ),
    *_names(
        "prime-rl",
        ("orchestrator.batch_size", "groups_per_step", "groups_per_step counts tasks, not replies"),
        ("orchestrator.group_size", "group_size"),
        ("rollouts_per_example", "group_size"),
        ("max_async_level", "staleness"),
        ("trainer.optim.lr", "optimizer.learning_rate"),
        ("max_completion_tokens", "sampling.max_tokens"),
        ("seq_len", "sampling.max_total_tokens"),
        ("ckpt.interval", "checkpoint.every"),
        ("eval.interval", "eval.every"),
    ),
    *_names(
        "tinker-cookbook",
        ("model_name", "model.name"),
        ("lora_rank", "model.rank"),
        ("groups_per_batch", "groups_per_step"),
        ("max_tokens", "sampling.max_tokens"),
        ("kl_penalty_coef", "algorithm.kl_penalty.coef"),
        ("num_substeps", "updates.minibatches"),
        ("loss_fn", "algorithm.loss.type"),
        ("load_checkpoint_path", "model.load_from"),
        ("log_path", "folder"),
        ("eval_every", "eval.every"),
        ("save_every", "checkpoint.every"),
        ("wandb_project", "monitors", "a monitor of type wandb"),
        ("renderer_name", "model.chat_template"),
    ),
    *_names(
        "other systems",
        ("lr", "optimizer.learning_rate"),
        ("batch_size", "groups_per_step", "groups_per_step counts tasks, and group_size replies to each"),
        ("kl_coef", "algorithm.kl.coef"),
        ("clip_range", "algorithm.loss.clip_low algorithm.loss.clip_high"),
        ("clip_ratio", "algorithm.loss.clip_low algorithm.loss.clip_high"),
        ("entropy_coef", "algorithm.entropy.coef"),
        ("n", "group_size"),
        ("num_rollouts", "group_size"),
        ("max_seq_length", "sampling.max_total_tokens"),
        ("max_length", "sampling.max_total_tokens"),
        ("total_steps", "steps"),
        ("num_steps", "steps"),
        ("num_epochs", "epochs"),
        ("total_epochs", "epochs"),
        ("dataset", "tasks.train"),
        ("reward_fn", "rewards"),
        ("stop_sequences", "sampling.stop"),
        ("stop_token_ids", "sampling.stop", "texts and token ids"),
        ("target_modules", "model.train_attn model.train_mlp model.train_unembed"),
        ("num_return_sequences", "group_size"),
        ("betas", "optimizer.beta1 optimizer.beta2"),
        ("api_key", "model.api_key_env", "the name of an environment variable"),
        ("base_url", "model.base_url"),
        ("url", "model.base_url"),
        ("gamma", "algorithm.advantage.gamma"),
        ("lam", "algorithm.advantage.lam"),
    ),
)


def suggestion(key: str, our_names: Collection[str] = ()) -> str:
    """The sentence about a key that another system has: its name there, and ours; empty for any other key.

    `our_names` are names of keys of ours: of those, the last part of a key alone does not say which key is meant.
    """
    tail = key.rpartition(".")[2]
    row = next((row for row in OTHER_NAMES if row.name == key), None)
    if row is None and len(tail) > 1:
        row = next((row for row in OTHER_NAMES if row.name.endswith(f".{key}") and "." in key), None)
        row = row or next((row for row in OTHER_NAMES if row.name == tail), None)
    if row is None and len(tail) > 1 and tail not in our_names:
        row = next((row for row in OTHER_NAMES if row.name.rpartition(".")[2] == tail), None)
    if row is None or key in row.our_keys:
        return ""
    owner = f"{row.system}'s name" if row.system != "other systems" else "a name of other systems"
    remark = f" ({row.remark})" if row.remark else ""
    ours = f"here: {' and '.join(row.our_keys)}" if row.our_keys else "there is no such setting here"
    return f"{row.name} is {owner}; {ours}{remark}."
