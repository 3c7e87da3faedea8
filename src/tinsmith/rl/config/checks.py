"""Checks across the sections of a run file. Each raises ValueError, which says what to change."""

from __future__ import annotations

from tinsmith.plurals import counted
from tinsmith.rl.algorithms.advantages.group import GrpoAdvantage
from tinsmith.rl.algorithms.advantages.multi_turn import StepWiseGrpoAdvantage
from tinsmith.rl.config.checkpoints import CheckpointConfig
from tinsmith.rl.config.environment_checks import check_environments, check_sections
from tinsmith.rl.config.fields import RunSettings
from tinsmith.rl.environments.tasks import TasksEnvironment
from tinsmith.settings import changed_keys

_HIGH_STALENESS = 8
"""Staleness above which a run file must say that it means it."""

_WITHOUT_TASKS = {"every", "before", "after", "compare", "functions", "benchmarks"}
"""Keys of `eval` that have an effect without held-out tasks."""


def _check_data(config: RunSettings) -> None:
    if config.mode == "bench":
        return
    kind, learns_from = config.algorithm.type, config.algorithm.learns_from
    if config.samples and not config.trained:
        lacking, fix = "tasks.train is missing", "set tasks.train"
        if config.environments:
            lacking, fix = "every environment has weight 0", "set a weight above 0"
        raise ValueError(f"{lacking}: {kind} trains on replies to tasks; {fix}")
    if learns_from != "rollouts" and config.demonstrations is None:
        raise ValueError(f"demonstrations is missing: {kind} trains on demonstrations; set demonstrations.data")
    if learns_from == "rollouts" and config.demonstrations is not None:
        raise ValueError(
            f"demonstrations is not used with {kind}; leave it out, or set algorithm.type to sft, dpo or mix"
        )
    if config.algorithm.verdict and config.demonstrations is not None and config.demonstrations.learn == "all":
        raise ValueError(f"{kind} scores whole replies; leave out demonstrations.learn")
    if config.algorithm.reads_mismatched and config.demonstrations is not None:
        _check_two(config.demonstrations.count(config.groups_per_step, config.group_size, alone=True), kind)
    if kind == "cpt" and config.demonstrations is not None and config.demonstrations.learn != "text":
        raise ValueError("cpt trains on plain text; set demonstrations.learn to text, or algorithm.type to sft")
    if learns_from == "pairs" and config.demonstrations is not None and config.demonstrations.learn == "text":
        raise ValueError(f"{kind} compares replies to a chat, not plain text; leave out demonstrations.learn")


def _check_two(demonstrations: int, kind: str) -> None:
    if demonstrations < 2:
        raise ValueError(
            f"{kind} needs two pairs, or two replies with labels, in a step; set demonstrations.per_step to 2 or more"
        )


def _check_steps(config: RunSettings) -> None:
    if not config.steps and config.epochs is None and config.mode != "bench":
        raise ValueError("steps is missing; set steps or epochs")
    if config.mode == "train" and config.uses_rollouts and not config.trained and not config.steps:
        raise ValueError(
            "steps is missing: epochs count passes over tasks, and this run of mode train has none; set steps"
        )


def _check_staleness(config: RunSettings) -> None:
    if config.staleness > _HIGH_STALENESS and not config.allow_high_staleness:
        raise ValueError(
            f"staleness {config.staleness} is above {_HIGH_STALENESS}: such rollouts are too far off-policy to learn "
            "well from; set it lower (1 or 2 overlap sampling and training), or set allow_high_staleness: true"
        )
    own = config.backoff not in (None, "auto")
    if own and (config.mode != "both" or config.sync.style != "fixed"):
        raise ValueError("backoff needs mode both and sync.style fixed, which admit batches by step; leave it out")


def _check_refills(config: RunSettings) -> None:
    if config.filter_refills and not (config.filters or config.min_partial_groups):
        raise ValueError(
            "filter_refills is not used without filters; set filters or min_partial_groups, or leave it out"
        )


def _check_router_replay(config: RunSettings) -> None:
    if config.model.router_replay == "none":
        return
    if config.mode == "bench" or not config.uses_rollouts:
        raise ValueError("model.router_replay is not used without training on samples of the policy; leave it out")


def _check_reference(config: RunSettings) -> None:
    if config.mode == "bench":
        return
    if config.algorithm.reference == "start" and not config.model.load_from:
        raise ValueError("algorithm.reference: start needs model.load_from; a new adapter equals the base model")


def _check_groups(config: RunSettings) -> None:
    advantage = config.algorithm.advantage
    if (
        config.group_size == 1
        and isinstance(advantage, GrpoAdvantage | StepWiseGrpoAdvantage)
        and advantage.std_threshold is not None
    ):
        raise ValueError("group_size 1 leaves no rollouts to compare; set it to 2 or more, or use a critic (ppo)")
    single = config.samples and config.group_size == 1 and config.algorithm.grouping != "rollout"
    if single and (titles := [title for each in config.trained for title in each.group_rewards]):
        raise ValueError(f"reward {titles[0]} compares the replies of a group; set group_size to 2 or more")


def _check_updates(config: RunSettings) -> None:
    if config.mode in ("bench", "explore"):
        return
    updates, groups = config.updates, config.groups_per_step
    for key in ("minibatches", "stream"):
        if config.uses_rollouts and (number := getattr(updates, key)) > groups:
            raise ValueError(
                f"updates.{key} is {number}, and a batch has {groups} groups, which stay whole; set it to {groups} or "
                "less, or raise groups_per_step"
            )
    if not config.uses_rollouts and config.demonstrations is not None:
        rows = config.demonstrations.count(groups, config.group_size, alone=True)
        if updates.minibatches > rows:
            raise ValueError(
                f"updates.minibatches is {updates.minibatches}, and a batch has {counted(rows, 'demonstration')}; set "
                f"it to {rows} or less, or raise demonstrations.per_step"
            )
    if updates.stream > 1 and config.algorithm.stream_fault:
        raise ValueError(f"updates.stream: {config.algorithm.stream_fault}, or leave out updates.stream")
    if updates.stream > 1 and (config.filter_refills or config.buffer.replay.enable):
        key = "filter_refills" if config.filter_refills else "buffer.replay"
        raise ValueError(f"updates.stream is not used with {key}, which needs whole batches; leave out one of them")
    if updates.minibatches > 1 and config.algorithm.refill:
        raise ValueError(
            "algorithm.refill copies replies of the whole batch, which has no groups to divide then; leave it out, or "
            "leave out updates.minibatches"
        )


def _check_mode(config: RunSettings) -> None:
    if config.mode == "explore" and not config.uses_rollouts:
        raise ValueError(
            f"mode explore samples rollouts, which {config.algorithm.type} does not use; set mode to train"
        )
    if config.mode == "bench" and not config.evaluates:
        raise ValueError("mode bench needs held-out tasks and rewards; set tasks.eval and rewards")
    if config.shares_a_run and config.buffer.type == "memory":
        raise ValueError(
            f"mode {config.mode} is one of two processes that share a buffer; set buffer.type to file or sql"
        )
    if config.shares_a_run and config.sync.method == "memory":
        raise ValueError(
            f"mode {config.mode}: another process cannot open weights in memory; set sync.method to checkpoint"
        )
    if config.shares_a_run and config.resume == "rename":
        raise ValueError(
            f"mode {config.mode} is one of two processes that share the run's folder, so resume cannot be rename; "
            "to start a new run, set another folder in both files"
        )


def _check_ending(config: RunSettings) -> None:
    if config.time_limit is not None and config.mode in ("explore", "bench"):
        why = "it ends with the training process" if config.mode == "explore" else "it takes no steps"
        raise ValueError(f"time_limit is not used with mode {config.mode}: {why}; leave it out")
    if config.until is None:
        return
    if config.mode == "bench":
        raise ValueError("until is not used with mode bench, which takes no steps; leave it out")
    if config.mode == "explore":
        raise ValueError("until is not used with mode explore, which ends with the training process; leave it out")
    if config.until.metric.startswith("eval/") and not (config.evaluates_anything and config.eval.every):
        raise ValueError(
            f"until.metric: {config.until.metric} is never measured; set tasks.held_out and rewards, and eval.every"
        )


def _check_best_checkpoint(config: RunSettings) -> None:
    if config.checkpoint.keep != "best" or config.stages or config.mode in ("bench", "explore"):
        return
    held_out = config.checkpoint.metric == CheckpointConfig.model_fields["metric"].default
    evaluates = config.evaluates if held_out else config.evaluates_anything
    if not evaluates or not (config.eval.every or config.eval.after):
        raise ValueError(
            f"checkpoint.keep: best needs evaluations, and {config.checkpoint.metric} is never measured; set "
            "tasks.held_out and rewards, and eval.every"
        )


def _check_resume_from(config: RunSettings) -> None:
    if not config.resume_from:
        return
    if config.mode == "bench" or config.shares_a_run:
        raise ValueError(f"resume_from is not used with mode {config.mode}; set mode to both")
    if config.uses_rollouts and config.buffer.type != "memory":
        raise ValueError(
            f"resume_from needs buffer.type memory; a buffer of type {config.buffer.type} no longer has the batches "
            "that a checkpoint waited for"
        )


def _check_evaluation(config: RunSettings) -> None:
    has_settings = bool(config.eval.model_fields_set)
    if titles := [title for each in config.evaluated.values() for title in each.group_rewards]:
        raise ValueError(
            f"eval.rewards: {titles[0]} compares the replies of a group, and an evaluation scores each one by itself; "
            "set another reward"
        )
    only_other = config.evaluates_anything and config.eval.model_fields_set <= _WITHOUT_TASKS
    if has_settings and config.evaluated and not config.evaluates and not only_other:
        only_groups = any(each.group_rewards for each in config.all_environments)
        why = ", because those of the run compare the replies of a group" if only_groups else ""
        raise ValueError(f"eval needs rewards{why}; set {'' if why else 'rewards or '}eval.rewards")
    if has_settings and not config.evaluated and not config.evaluates_anything:
        key = "held_out of an environment" if config.environments else "tasks.held_out or tasks.eval"
        raise ValueError(f"eval needs held-out tasks; set {key}, or leave out eval")
    if unknown := sorted(config.eval.sources.keys() - (config.evaluated.keys() - {""})):
        owner = "no environment with held-out tasks has" if config.environments else "tasks.eval has no source with"
        raise ValueError(f"eval.sources.{unknown[0]}: {owner} this name")
    if "threshold" in changed_keys(config.eval) and all(each.says_correct for each in config.evaluated.values()):
        rewards = [each.rewards for each in config.evaluated.values() if isinstance(each, TasksEnvironment)]
        say = next((f"the reward {each.title} says" for row in rewards for each in row if each.says_correct), "")
        say = say or "the rewards of every environment say"
        raise ValueError(f"eval.threshold is not used: {say} what is right; leave out threshold")


CHECKS = (
    check_environments,
    check_sections,
    _check_data,
    _check_steps,
    _check_staleness,
    _check_refills,
    _check_router_replay,
    _check_reference,
    _check_groups,
    _check_updates,
    _check_mode,
    _check_ending,
    _check_best_checkpoint,
    _check_resume_from,
    _check_evaluation,
)
