"""Checks of the environments of a run file. Each raises ValueError, which says what to change."""

from __future__ import annotations

import re
from collections import Counter

from tinsmith.rl.config.fields import RunSettings
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.evaluate import EvalConfig
from tinsmith.settings import changed_keys

_IN_METRICS = ("reward", "turns", "tokens", "workflow", "failed", "tasks", "benchmark")
"""Names in metrics of an evaluation, as in eval/reward/mean."""
_PER_ENVIRONMENT = ("workflow", "rewards")
"""Keys of `eval` that each environment has itself."""


def check_sections(config: RunSettings) -> None:
    """Raise ValueError unless environments use the sections that they share, and this mode has what they need."""
    environments = config.all_environments
    used = {key for each in environments for key in each.sections}
    if unknown := sorted(used - config.sections.keys()):
        raise ValueError(
            f"there is no section {unknown[0]}, which an environment of this run shares; only a type of an installed "
            "package can add one: use a field of the environment"
        )
    if unused := [key for key in changed_keys(config) if key in config.sections and key not in used]:
        raise ValueError(f"{unused[0]} is not used: no environment of this run needs it; leave it out")
    needing = [each.title for each in environments if each.needs_policy]
    if needing and config.mode in ("explore", "bench"):
        raise ValueError(
            f"mode {config.mode} has no policy in training, which environment {needing[0]} needs; set mode to both, or "
            "leave the environment out"
        )


def check_environments(config: RunSettings) -> None:
    """Raise ValueError unless the environments fit each other and the other sections of the run."""
    if config.environments:
        _check_list(config)
    _check_training(config)
    if config.environments:
        _check_evaluation(config)


def _check_list(config: RunSettings) -> None:
    if unused := [key for key in ("tasks", "workflow", "rewards") if key in changed_keys(config)]:
        raise ValueError(
            f"{unused[0]} is not used with environments, which have their own; move it into one of type tasks"
        )
    titles = [each.title for each in config.all_environments]
    if twice := [title for title, count in Counter(titles).items() if count > 1]:
        raise ValueError(f"two environments are called {twice[0]}; give each a name of its own")
    for title in titles:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", title) or title in _IN_METRICS:
            raise ValueError(
                f"environment {title}: the name is part of metrics; set name to letters, digits, _, . and -, and to "
                f"none of {', '.join(_IN_METRICS)}"
            )


def _check_training(config: RunSettings) -> None:
    if not config.trains_on_tasks:
        return
    if config.epochs is not None and len(config.trained) > 1:
        raise ValueError("epochs is not used with several environments, which differ in size; set steps")
    advantage = config.algorithm.advantage
    for each in config.trained if config.samples else ():
        place = f"environment {each.title}: " if each.title else ""
        if advantage.reads_rewards and not each.provides_rewards:
            lacking, fix = (place, "its rewards") if place else ("rewards is missing: ", "rewards")
            raise ValueError(f"{lacking}no reward function scores the rollouts; set {fix}")
        if advantage.reads_states and not each.provides_states:
            owner = "this environment" if place else f"workflow {config.workflow.type}"
            raise ValueError(
                f"{place}{advantage.type} compares turns by state, and {owner} sets none; use multi_turn or custom, or "
                "algorithm.advantage {type: step_wise_grpo}, which compares whole rollouts"
            )
        if fault := config.algorithm.sampling_fault(each.sampling_of(config.sampling)):
            raise ValueError(f"{place}{fault}")


def _check_evaluation(config: RunSettings) -> None:
    settings = config.eval
    if settings.baseline:
        raise ValueError("eval.baseline is not used with environments; leave it out")
    for place, part in [
        ("eval", settings),
        *((f"eval.sources.{name}", each) for name, each in settings.sources.items()),
    ]:
        if unused := [key for key in _PER_ENVIRONMENT if key in changed_keys(part)]:
            raise ValueError(
                f"{place}.{unused[0]} is not used with environments, which have their own; to evaluate differently, "
                "add an environment with weight 0"
            )
    for each in config.all_environments:
        if not each.weight:
            _check_only_evaluated(each, settings)
        if each.evaluates and not each.evaluated_with(None, ()).provides_rewards:
            lacking, fix = "no reward function scores the answers", "set its rewards"
            if each.group_rewards:
                lacking = f"{each.group_rewards[0]} compares replies, and no reward function scores single ones"
                fix += ", or held_out to 0" if each.weight else ""
            raise ValueError(f"environment {each.title}: {lacking}; {fix}")


def _check_only_evaluated(environment: EnvironmentOptions, settings: EvalConfig) -> None:
    if not environment.evaluates:
        raise ValueError(
            f"environment {environment.title}: weight 0 only evaluates, and no tasks are held out; set its held_out"
        )
    own = settings.of_source(environment.title)
    overrides = {"temperature", *(key for key in ("top_p", "top_k", "max_tokens") if own.__dict__[key] is not None)}
    if unused := sorted(environment.sampling.keys() & overrides):
        raise ValueError(
            f"environment {environment.title}: sampling.{unused[0]} is not used with weight 0, because eval sets "
            f"{unused[0]}; set eval.sources.{environment.title}.{unused[0]}"
        )
