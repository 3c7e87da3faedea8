"""Trinity's `algorithm` section as ours: parts by their names, arguments over defaults, and the optimizer.

In Trinity a user's arguments replace the defaults; here they lie over them. Leaves out the tables of names
(`names.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.dialects.base import Becoming, idle
from tinsmith.dialects.trinity.arguments import Part, laid_over, near
from tinsmith.dialects.trinity.keys_algorithm import Algorithm, Optimizer
from tinsmith.dialects.trinity.name_tables import (
    ADVANTAGES,
    AGGREGATES,
    DIVERGENCES,
    ENTROPIES,
    JUDGE,
    LOSSES,
    MISSING_ADVANTAGES,
    PARTS,
    REPEATS,
    WORKFLOWS,
)
from tinsmith.dialects.trinity.schema import TrinityFile

SUPERVISED = ("sft", "cpt", "dpo")
"""Algorithms that learn from data in place of rollouts."""
TAUGHT = ("on_policy_distill", "jsd")


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """`algorithm` and `optimizer` of the run, and `group_size`."""
    section = file.algorithm
    name = section.algorithm_type
    if name not in PARTS:
        becoming.fault("algorithm.algorithm_type", f"there is no '{name}'.", near(name, PARTS))
        return
    ours: dict[str, Any] = {"type": "grpo_std" if name == "grpo" else name}
    advantage, loss = PARTS[name]
    _part(ours, "advantage", section.advantage_fn, advantage, section.advantage_fn_args, ADVANTAGES, becoming)
    _part(ours, "policy_loss", section.policy_loss_fn, loss, section.policy_loss_fn_args, LOSSES, becoming)
    _divergence(ours, "kl", "kl_loss_fn", section.kl_loss_fn, section.kl_loss_fn_args, becoming)
    _divergence(ours, "kl_penalty", "kl_penalty_fn", section.kl_penalty_fn, section.kl_penalty_fn_args, becoming)
    _entropy(ours, section, becoming)
    if section.loss_agg_mode is not None and loss == "dpo":
        becoming.note("algorithm.loss_agg_mode: dpo's loss is a mean over pairs.")
    elif section.loss_agg_mode is not None:
        _aggregate(ours, "algorithm.loss_agg_mode", section.loss_agg_mode, becoming)
    _beside(ours, file, becoming)
    becoming.settings["algorithm"] = ours
    _repeats(name, section, becoming)
    _optimizer(section.optimizer, becoming, by_tinker=file.model.tinker.enable)


def _part(
    ours: dict[str, Any],
    kind: str,
    given: str | None,
    usual: str,
    arguments: Mapping[str, Any] | None,
    table: Mapping[str, Part],
    becoming: Becoming,
) -> None:
    """One part by its name, or the algorithm's usual one, with arguments."""
    key = f"algorithm.{kind}_fn"
    name = given or usual
    if not name:
        if arguments:
            becoming.fault(f"{key}_args", f"{ours['type']} has none of its own here.", f"Set {key} as well.")
        return
    if name in MISSING_ADVANTAGES and table is ADVANTAGES:
        becoming.fault(key, f"'{name}' is not here.", MISSING_ADVANTAGES[name])
        return
    if name not in table:
        becoming.fault(key, f"there is no '{name}'.", near(name, table))
        return
    part, rest = table[name], dict(arguments or {})
    if table is LOSSES and (mode := rest.pop("loss_agg_mode", None)) is not None:
        _aggregate(ours, f"{key}_args.loss_agg_mode", mode, becoming)
    settings = laid_over(part, rest, f"{key}_args", ours, becoming)
    if part.type == "rec" and settings.get("regularizer") == "k2" and "regularizer_coef" in settings:
        settings["regularizer_coef"] *= 2  # Trinity's is the square without its half
    if settings.get("clip") == "gspo_one_side":
        ours["aggregate"] = "seq_mean_token_mean"
    ours["loss" if table is LOSSES else kind] = settings


def _aggregate(ours: dict[str, Any], key: str, value: Any, becoming: Becoming) -> None:
    found = AGGREGATES.get(str(value))
    if found is None:
        becoming.fault(key, f"there is no '{value}'.", f"It is one of {', '.join(AGGREGATES)}.")
    elif ours.get("aggregate", found) != found:
        becoming.fault(key, f"'{value}' here and another mode elsewhere: a run has one.", "Give it once.")
    else:
        ours["aggregate"] = found


def _divergence(
    ours: dict[str, Any],
    to: str,
    kind: str,
    given: str | None,
    arguments: Mapping[str, Any] | None,
    becoming: Becoming,
) -> None:
    """kl_loss_fn and kl_penalty_fn: an estimator, a coefficient, perhaps one that adapts."""
    if given is not None and given not in DIVERGENCES:
        becoming.fault(f"algorithm.{kind}", f"there is no '{given}'.", near(given, DIVERGENCES))
        return
    known = ("kl_coef", "adaptive", "target_kl", "horizon")
    for name in arguments or {}:
        if name not in known:
            becoming.fault(f"algorithm.{kind}_args.{name}", "there is no such argument.", near(name, known))
    usual = "k2" if to == "kl" and ours["type"] not in _WITHOUT_KL else "none"
    chosen, values = given or usual, dict(arguments or {})
    if chosen == "none":
        if values.get("kl_coef"):
            becoming.note(f"algorithm.{kind}_args.kl_coef: {kind} is none here, so it does nothing, as in Trinity.")
        ours[to] = {"type": "none"}
        return
    settings: dict[str, Any] = {"type": chosen, "coef": values.get("kl_coef", 0.001)}
    if values.get("adaptive"):
        if not (values.get("target_kl") and values.get("horizon")):
            cure = "Set target_kl and horizon as well, or leave out adaptive."
            becoming.fault(f"algorithm.{kind}_args.adaptive", "it wants a target and a horizon.", cure)
            return
        settings |= {"target": values["target_kl"], "horizon": values["horizon"]}
    ours[to] = settings


_WITHOUT_KL = ("dapo", "asymre", "dpo", "raft", "sppo", "on_policy_distill", "jsd", "sft", "cpt")


def _entropy(ours: dict[str, Any], section: Algorithm, becoming: Becoming) -> None:
    arguments = dict(section.entropy_loss_fn_args or {})
    name = section.entropy_loss_fn or "default"
    if name not in ENTROPIES:
        becoming.fault("algorithm.entropy_loss_fn", f"there is no '{name}'.", near(name, ENTROPIES))
    for unknown in arguments.keys() - {"entropy_coef"}:
        key = f"algorithm.entropy_loss_fn_args.{unknown}"
        becoming.fault(key, "there is no such argument.", near(unknown, ["entropy_coef"]))
    coef = arguments.get("entropy_coef", 0.0)
    if name == "none" and coef:
        becoming.note("algorithm.entropy_loss_fn_args.entropy_coef: entropy_loss_fn is none, so it does nothing.")
    ours["entropy"] = {"coef": 0.0 if name == "none" else coef}


def _beside(ours: dict[str, Any], file: TrinityFile, becoming: Becoming) -> None:
    """A critic's warm-up and a teacher's name, where there is one of them."""
    reads = ours.get("advantage", {}).get("type")
    if reads == "gae":
        ours["critic"] = {"warmup_steps": file.trainer.critic_warmup}
    elif file.trainer.critic_warmup:
        becoming.note("trainer.critic_warmup: nothing here has a critic.")
    for at, one in enumerate(file.explorer.auxiliary_models):
        if not one.model_path:
            key = f"explorer.auxiliary_models[{at}].model_path"
            becoming.fault(key, "it is not set.", "Name a base model that the server has, or a tinker:// path.")
        elif at or not (reads in TAUGHT or _judges(file)):
            idle(one, becoming, f"explorer.auxiliary_models[{at}].", "nothing in this run asks it.")
        elif one.external_model_config.enable and reads in TAUGHT:
            key = f"explorer.auxiliary_models[{at}].external_model_config.enable"
            becoming.fault(key, "a teacher tells logprobs, which OpenAI's API does not.", "Serve it: tinsmith serve.")
        elif not one.external_model_config.enable:
            why = "it counts only with enable: true."
            idle(one.external_model_config, becoming, f"explorer.auxiliary_models[{at}].external_model_config.", why)
    if reads in TAUGHT:
        auxiliary = file.explorer.auxiliary_models
        if auxiliary and auxiliary[0].model_path:
            ours["teacher"] = auxiliary[0].model_path
        else:
            cure = "Name one in explorer.auxiliary_models: a model that the server has, or a tinker:// path."
            becoming.fault("algorithm.advantage_fn", f"{reads} compares with a teacher.", cure)


def _judges(file: TrinityFile) -> bool:
    """Whether some workflow has its replies judged by another model."""
    given = file.buffer.explorer_input
    tasksets = [one for one in (given.taskset, *given.tasksets, *given.eval_tasksets) if one is not None]
    names = {one.default_workflow_type or given.default_workflow_type or "" for one in tasksets}
    names |= {given.default_eval_workflow_type or ""} if given.eval_tasksets else set()
    works = [WORKFLOWS.get(name.removeprefix("async_")) for name in names]
    return any(work is not None and work.reward == JUDGE for work in works)


def without_states(becoming: Becoming) -> None:
    """gigpo of turns that have none, as Trinity does it: whole rollouts are compared, and nothing is added."""
    ours = becoming.settings.get("algorithm", {})
    given = ours.get("advantage", {})
    if given.get("type") == "gigpo":
        normalize = "group" if given.get("normalize") else "none"
        ours["advantage"] = {"type": "step_wise_grpo", "normalize": normalize}
        becoming.note(
            "gigpo: turns of this workflow have no states, so whole rollouts alone are compared, as in Trinity."
        )


def _repeats(name: str, section: Algorithm, becoming: Becoming) -> None:
    if section.repeat_times is not None and section.repeat_times < 1:
        becoming.fault("algorithm.repeat_times", f"{section.repeat_times} replies are none.", "Set 1 or more.")
        return
    if name in SUPERVISED:
        if section.repeat_times is not None:
            becoming.note(f"algorithm.repeat_times: {name} learns from data, and asks nothing.")
        return
    usual = REPEATS.get(name, 2)
    becoming.put("group_size", section.repeat_times or usual)
    if section.repeat_times is None:
        becoming.note(f"algorithm.repeat_times is not set: {usual}, as documented for {name} (Trinity itself takes 1).")


def _optimizer(section: Optimizer, becoming: Becoming, *, by_tinker: bool) -> None:
    schedules = ("constant", "linear", "cosine")
    schedule = section.warmup_style or section.lr_scheduler_type
    key = "algorithm.optimizer."
    if schedule not in schedules:
        name = "warmup_style" if section.warmup_style else "lr_scheduler_type"
        becoming.fault(f"{key}{name}", f"there is no '{schedule}'.", near(schedule, schedules))
    else:
        becoming.put("optimizer.schedule", schedule)
    if section.warmup_style and "lr_scheduler_type" in section.model_fields_set:
        becoming.note(f"{key}lr_scheduler_type: warmup_style, its old name, is set as well and is what counts.")
    if schedule != "constant":
        becoming.put("optimizer.min_ratio", section.min_lr_ratio)
    elif "min_lr_ratio" in section.model_fields_set:
        becoming.note(f"{key}min_lr_ratio: a constant schedule does not fall.")
    if section.lr_warmup_steps >= 0:
        becoming.put("optimizer.warmup_steps", section.lr_warmup_steps)
        if section.lr_warmup_steps_ratio:
            becoming.note(f"{key}lr_warmup_steps_ratio: it counts only where lr_warmup_steps is -1.")
    elif section.lr_warmup_steps_ratio:
        becoming.put("optimizer.warmup_ratio", section.lr_warmup_steps_ratio)
    becoming.put("optimizer.beta1", section.betas[0])
    becoming.put("optimizer.beta2", section.betas[1])
    becoming.put("optimizer.eps", 1e-12 if by_tinker else 1e-8)  # those of the SDK, and of torch; Trinity sends none
