"""Trinity's `algorithm` section: components with their arguments, other models, the optimizer.

In Trinity, arguments in the file replace the defaults; here they are merged over them. `name_tables` has the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.dialects.base import (
    NOTHING,
    Translation,
    combine,
    did_you_mean,
    fault,
    note,
    note_unused,
    settings,
    translates,
)
from tinsmith.integrations.trinity.files import corrections
from tinsmith.integrations.trinity.files.arguments import Component, merge_arguments
from tinsmith.integrations.trinity.files.name_tables import (
    ADVANTAGES,
    AGGREGATES,
    ALGORITHMS,
    DEFAULT_GROUP_SIZES,
    DISTILLING,
    DIVERGENCES,
    ENTROPIES,
    JUDGE,
    LOSSES,
    MISSING_ADVANTAGES,
    MIXED,
    MIXED_AGGREGATES,
    SUPERVISED,
    WORKFLOWS,
)
from tinsmith.integrations.trinity.files.schema import Algorithm, Optimizer, TrinityFile
from tinsmith.integrations.trinity.files.schema_runtime import AuxiliaryModel, Trainer

STATELESS = ("single_turn", "math", "agent")
"""Workflow types whose turns have no states."""
_KL_COEF = 0.001
_WITHOUT_KL = ("dapo", "asymre", "raft", "sppo", "on_policy_distill", "jsd", "sft", "cpt")


def advantage_type(file: TrinityFile) -> str:
    """Our type of the file's advantage; empty if there is none, or an unknown one."""
    default, _ = ALGORITHMS.get(file.algorithm.algorithm_type, ("", ""))
    component = ADVANTAGES.get(file.algorithm.advantage_fn or default)
    return component.type if component else ""


@translates(Algorithm, algorithm_type="algorithm.type; Trinity's grpo is grpo_std here")
def translate(file: TrinityFile, workflow_type: str = "") -> Translation:
    """`algorithm`, `group_size` and `optimizer`; `workflow_type` is our type of the training workflow."""
    section = file.algorithm
    name = section.algorithm_type
    if name not in ALGORITHMS:
        return fault("algorithm.algorithm_type", f"there is no '{name}'.", did_you_mean(name, ALGORITHMS))
    return (
        settings({"algorithm.type": "grpo_std" if name == "grpo" else name})
        + _advantage(section, workflow_type)
        + _policy_loss(section)
        + _divergence("kl", section.kl_loss_fn, "kl_loss_fn", section.kl_loss_fn_args, name)
        + _divergence("kl_penalty", section.kl_penalty_fn, "kl_penalty_fn", section.kl_penalty_fn_args, name)
        + _entropy(section)
        + _aggregate(section)
        + _critic(file)
        + _auxiliary_models(file)
        + _teacher(file)
        + _old_logprobs_of_trainer(file)
        + corrections.rollout_correction(file)
        + corrections.router_replay(file)
        + _group_size(section)
        + _optimizer(section.optimizer, tinker_defaults=file.model.tinker.enable)
    )


@translates(
    Algorithm,
    advantage_fn="algorithm.advantage",
    advantage_fn_args="algorithm.advantage, merged over its defaults",
)
def _advantage(section: Algorithm, workflow_type: str) -> Translation:
    name = section.advantage_fn or ALGORITHMS[section.algorithm_type][0]
    if name in MISSING_ADVANTAGES:
        return fault("algorithm.advantage_fn", f"'{name}' is not supported.", MISSING_ADVANTAGES[name])
    component, result = _component("advantage_fn", name, section.advantage_fn_args, ADVANTAGES)
    if component is None:
        return result
    advantage, companion, messages = merge_arguments(
        component, section.advantage_fn_args or {}, "algorithm.advantage_fn_args"
    )
    result += messages
    if component.type == "gigpo" and workflow_type in STATELESS:
        # As in Trinity: without states, only whole rollouts can be compared.
        advantage = {"type": "step_wise_grpo", "normalize": "group" if advantage.get("normalize") else "none"}
        result += note(
            "gigpo: turns of this workflow have no states, so only whole rollouts are compared, as in Trinity."
        )
    return result + settings({"algorithm.advantage": advantage, **{f"algorithm.{k}": v for k, v in companion.items()}})


@translates(Algorithm, policy_loss_fn="algorithm.loss", policy_loss_fn_args="algorithm.loss, merged over its defaults")
def _policy_loss(section: Algorithm) -> Translation:
    arguments = dict(section.policy_loss_fn_args or {})
    name = section.policy_loss_fn or ALGORITHMS[section.algorithm_type][1]
    component, result = _component("policy_loss_fn", name, arguments, LOSSES)
    if component is None:
        return result
    for key in ("loss_agg_mode", *(MIXED_AGGREGATES if component.type in MIXED else ())):
        arguments.pop(key, None)  # translated by _aggregate
    loss, _, messages = merge_arguments(component, arguments, "algorithm.policy_loss_fn_args")
    if component.type == "cispo" and loss.get("mask"):  # Trinity's mask has bounds of its own
        loss = {"mask_low": 1.0, "mask_high": 0.28, **loss}
    if component.type == "rec" and loss.get("regularizer") == "k2" and "regularizer_coef" in loss:
        loss["regularizer_coef"] *= 2  # Trinity's k2 is the square, ours half of it
    return result + messages + settings({"algorithm.loss": loss})


@translates(Algorithm, bypass_old_logprobs="algorithm.correction: false is type proximal")
def _old_logprobs_of_trainer(file: TrinityFile) -> Translation:
    """Without bypass_old_logprobs, ratios are relative to logprobs that the trainer computes before a batch."""
    key, section = "algorithm.bypass_old_logprobs", file.algorithm
    if section.bypass_old_logprobs or section.algorithm_type in SUPERVISED:
        return NOTHING
    if file.model.tinker.enable:
        return note(f"{key}: Trinity's trainer for Tinker does not read it.")
    return settings({"algorithm.correction": {"type": "proximal"}})


def old_logprobs(file: TrinityFile, sampling: Mapping[str, Any]) -> Translation:
    """The logprobs of replies sampled with top_p, top_k or greedily, whose importance weights no sampler returns."""
    loss = file.algorithm.policy_loss_fn or ALGORITHMS.get(file.algorithm.algorithm_type, ("", ""))[1]
    restricted = sampling.get("temperature") == 0 or sampling.get("top_p", 1.0) < 1 or sampling.get("top_k", -1) > 0
    if loss != "importance_sampling" or not restricted:
        return NOTHING
    text = "replies count as sampled from the whole distribution at temperature 1."
    return settings({"algorithm.old_logprobs": "recomputed"}) + note(
        f"algorithm.policy_loss_fn: with top_p, top_k or temperature 0, {text}"
    )


def _component(
    key: str, name: str, arguments: Mapping[str, Any] | None, table: Mapping[str, Component]
) -> tuple[Component | None, Translation]:
    """The named component, or None with a fault if there is no such one."""
    if name in table:
        return table[name], NOTHING
    if name:
        return None, fault(f"algorithm.{key}", f"there is no '{name}'.", did_you_mean(name, table))
    if arguments:
        problem = "the algorithm has no component that takes arguments."
        return None, fault(f"algorithm.{key}_args", problem, f"Set algorithm.{key} as well.")
    return None, NOTHING


@translates(Algorithm, loss_agg_mode="algorithm.aggregate, over the whole batch")
def _aggregate(section: Algorithm) -> Translation:
    """How token losses are aggregated: set in the section or in the loss's arguments, or implied by the loss."""
    arguments, default_loss = section.policy_loss_fn_args or {}, ALGORITHMS[section.algorithm_type][1]
    loss, result, mode = section.policy_loss_fn or default_loss, NOTHING, ""
    if loss in LOSSES and (value := arguments.get("loss_agg_mode")) is not None:
        mode, result = _aggregate_mode("algorithm.policy_loss_fn_args.loss_agg_mode", value)
    if loss == "rec" and arguments.get("clip_mode") == "gspo-one-side":
        mode = "seq_mean_token_mean"
    key, value = "algorithm.loss_agg_mode", section.loss_agg_mode
    if value is not None and default_loss == "dpo" and not (section.kl_loss_fn_args or {}).get("kl_coef", _KL_COEF):
        result += note(f"{key}: the loss of dpo is a mean over pairs.")
    elif value is not None:
        own, problem = _aggregate_mode(key, value)
        result += problem
        if own and mode not in ("", own):
            result += fault(key, f"'{value}' here and another mode elsewhere: a run has one.", "Set it once.")
        mode = mode or own
    if loss in MIXED:
        return result + _mixed_aggregates(arguments, mode)
    return result + (settings({"algorithm.aggregate": mode}) if mode else NOTHING)


def _mixed_aggregates(arguments: Mapping[str, Any], mode: str) -> Translation:
    """`mode` for rollouts and for demonstrations, unless the arguments set another one for either."""
    modes, result = {"rollouts": mode, "demonstrations": mode}, NOTHING
    for name, part in zip(MIXED_AGGREGATES, ("demonstrations", "rollouts"), strict=True):
        if arguments.get(name) is not None:
            modes[part], problem = _aggregate_mode(f"algorithm.policy_loss_fn_args.{name}", arguments[name])
            result += problem
    if modes["rollouts"]:
        result += settings({"algorithm.aggregate": modes["rollouts"]})
    if modes["demonstrations"] != modes["rollouts"]:
        result += settings({"algorithm.loss.expert_aggregate": modes["demonstrations"] or "token_mean"})
    return result


def _aggregate_mode(key: str, value: Any) -> tuple[str, Translation]:
    if mode := AGGREGATES.get(str(value), ""):
        return mode, NOTHING
    return "", fault(key, f"there is no '{value}'.", f"It is one of {', '.join(AGGREGATES)}.")


@translates(
    Algorithm,
    kl_loss_fn="algorithm.kl",
    kl_loss_fn_args="algorithm.kl, merged over its defaults",
    kl_penalty_fn="algorithm.kl_penalty",
    kl_penalty_fn_args="algorithm.kl_penalty, merged over its defaults",
)
def _divergence(
    to: str, name: str | None, key: str, arguments: Mapping[str, Any] | None, algorithm: str
) -> Translation:
    """An estimator of a divergence, its coefficient, and perhaps a target it adapts to."""
    if name is not None and name not in DIVERGENCES:
        return fault(f"algorithm.{key}", f"there is no '{name}'.", did_you_mean(name, DIVERGENCES))
    values, allowed = dict(arguments or {}), ("kl_coef", "adaptive", "target_kl", "horizon")
    result = combine(
        fault(f"algorithm.{key}_args.{unknown}", "there is no such argument.", did_you_mean(unknown, allowed))
        for unknown in values
        if unknown not in allowed
    )
    chosen = name or ("k2" if to == "kl" and algorithm not in _WITHOUT_KL else "none")
    if to == "kl" and algorithm == "dpo" and name == "none":
        chosen = "k2"
        result += note(f"algorithm.{key}: dpo always has a divergence, k2 here, as in Trinity; set kl_coef to 0.")
    if chosen == "none":
        if values.get("kl_coef"):
            result += note(f"algorithm.{key}_args.kl_coef: {key} is none, so it has no effect, as in Trinity.")
        return result + settings({f"algorithm.{to}": {"type": "none"}})
    term: dict[str, Any] = {"type": chosen, "coef": values.get("kl_coef", _KL_COEF)}
    if values.get("adaptive"):
        if not (values.get("target_kl") and values.get("horizon")):
            fix = "Set target_kl and horizon as well, or leave out adaptive."
            return result + fault(f"algorithm.{key}_args.adaptive", "it needs a target and a horizon.", fix)
        term |= {"target": values["target_kl"], "horizon": values["horizon"]}
    return result + settings({f"algorithm.{to}": term})


@translates(
    Algorithm,
    entropy_loss_fn="algorithm.entropy; exact where the server offers it",
    entropy_loss_fn_args="algorithm.entropy",
)
def _entropy(section: Algorithm) -> Translation:
    arguments, name = section.entropy_loss_fn_args or {}, section.entropy_loss_fn or "default"
    result = NOTHING
    if name not in ENTROPIES:
        result += fault("algorithm.entropy_loss_fn", f"there is no '{name}'.", did_you_mean(name, ENTROPIES))
    for unknown in arguments.keys() - {"entropy_coef"}:
        key = f"algorithm.entropy_loss_fn_args.{unknown}"
        result += fault(key, "there is no such argument.", did_you_mean(unknown, ["entropy_coef"]))
    coef = arguments.get("entropy_coef", 0.0)
    if name == "none" and coef:
        key = "algorithm.entropy_loss_fn_args.entropy_coef"
        result += note(f"{key}: entropy_loss_fn is none, so it has no effect.")
    return result + settings({"algorithm.entropy": {"coef": 0.0 if name == "none" else coef}})


@translates(Trainer, critic_warmup="algorithm.critic.warmup_steps")
def _critic(file: TrinityFile) -> Translation:
    if advantage_type(file) == "gae":
        return settings({"algorithm.critic": {"warmup_steps": file.trainer.critic_warmup}})
    return note("trainer.critic_warmup: this algorithm has no critic.") if file.trainer.critic_warmup else NOTHING


def _auxiliary_models(file: TrinityFile) -> Translation:
    """Faults and notes about models that this run cannot use, or does not."""
    result, distills = NOTHING, advantage_type(file) in DISTILLING
    for index, model in enumerate(file.explorer.auxiliary_models):
        key = f"explorer.auxiliary_models[{index}]"
        external = model.external_model_config
        if not model.model_path:
            fix = "Name a base model of the server, or a tinker:// path."
            result += fault(f"{key}.model_path", "it is not set.", fix)
        elif index or not (distills or _has_judge(file)):
            result += note_unused(model, f"{key}.", "this run does not use it.")
        elif external.enable and distills:
            problem = "a teacher must return logprobs, which the OpenAI API does not."
            result += fault(f"{key}.external_model_config.enable", problem, "Serve it with tinsmith serve.")
        elif not external.enable:
            why = "it has an effect only with enable: true."
            result += note_unused(external, f"{key}.external_model_config.", why)
    return result


@translates(AuxiliaryModel, model_path="of the first entry: algorithm.teacher, and the model of a judge")
def _teacher(file: TrinityFile) -> Translation:
    if (kind := advantage_type(file)) not in DISTILLING:
        return NOTHING
    models = file.explorer.auxiliary_models
    if models and models[0].model_path:
        return settings({"algorithm.teacher": models[0].model_path})
    fix = "Name one in explorer.auxiliary_models: a model of the server, or a tinker:// path."
    return fault("algorithm.advantage_fn", f"{kind} needs a teacher.", fix)


def _has_judge(file: TrinityFile) -> bool:
    """Whether another model judges the replies of some workflow."""
    tasks = file.buffer.explorer_input
    tasksets = [taskset for taskset in (tasks.taskset, *tasks.tasksets, *tasks.eval_tasksets) if taskset is not None]
    names = {taskset.default_workflow_type or tasks.default_workflow_type or "" for taskset in tasksets}
    names |= {tasks.default_eval_workflow_type or ""} if tasks.eval_tasksets else set()
    workflows = [WORKFLOWS.get(name.removeprefix("async_")) for name in names]
    return any(workflow is not None and workflow.reward == JUDGE for workflow in workflows)


@translates(Algorithm, repeat_times="group_size; if not set, the documented default of the algorithm, with a note")
def _group_size(section: Algorithm) -> Translation:
    name, size = section.algorithm_type, section.repeat_times
    if size is not None and size < 1:
        return fault("algorithm.repeat_times", f"{size} replies are too few.", "Set 1 or more.")
    if name in SUPERVISED:
        unused = note(f"algorithm.repeat_times: {name} trains on demonstrations and samples nothing.")
        return NOTHING if size is None else unused
    if size is not None:
        return settings({"group_size": size})
    default = DEFAULT_GROUP_SIZES.get(name, 2)
    text = f"algorithm.repeat_times is not set: {default}, as documented for {name} (Trinity itself uses 1)."
    return settings({"group_size": default}) + note(text)


@translates(
    Optimizer,
    warmup_style="optimizer.schedule: the old name of lr_scheduler_type",
    lr_scheduler_type="optimizer.schedule",
    min_lr_ratio="optimizer.min_ratio, for a schedule that decays",
    lr_warmup_steps="optimizer.warmup_steps; -1 uses lr_warmup_steps_ratio",
    lr_warmup_steps_ratio="optimizer.warmup_ratio, of the run's steps",
    betas="optimizer.beta1, optimizer.beta2",
)
def _optimizer(section: Optimizer, *, tinker_defaults: bool) -> Translation:
    schedules, key, result = ("constant", "linear", "cosine"), "algorithm.optimizer.", NOTHING
    schedule = section.warmup_style or section.lr_scheduler_type
    if schedule not in schedules:
        name = "warmup_style" if section.warmup_style else "lr_scheduler_type"
        result += fault(f"{key}{name}", f"there is no '{schedule}'.", did_you_mean(schedule, schedules))
    else:
        result += settings({"optimizer.schedule": schedule})
    if section.warmup_style and "lr_scheduler_type" in section.model_fields_set:
        result += note(f"{key}lr_scheduler_type: warmup_style, its old name, is set as well and is used.")
    if schedule != "constant":
        result += settings({"optimizer.min_ratio": section.min_lr_ratio})
    elif "min_lr_ratio" in section.model_fields_set:
        result += note(f"{key}min_lr_ratio: a constant schedule does not decay.")
    if section.lr_warmup_steps >= 0:
        result += settings({"optimizer.warmup_steps": section.lr_warmup_steps})
        if section.lr_warmup_steps_ratio:
            result += note(f"{key}lr_warmup_steps_ratio: it has an effect only where lr_warmup_steps is -1.")
    elif section.lr_warmup_steps_ratio:
        result += settings({"optimizer.warmup_ratio": section.lr_warmup_steps_ratio})
    # Trinity sends no eps: the Tinker SDK's default, or PyTorch's.
    eps = 1e-12 if tinker_defaults else 1e-8
    beta1, beta2 = section.betas
    return result + settings({"optimizer.beta1": beta1, "optimizer.beta2": beta2, "optimizer.eps": eps})
