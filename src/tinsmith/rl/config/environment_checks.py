"""Checks of the environments of a run file. Each raises ValueError, which says what to change."""

from __future__ import annotations

import re
from collections import Counter

from tinsmith.rl.config.fields import RunSettings
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.evaluate import EvalConfig
from tinsmith.settings import changed_keys

_IN_METRICS = ("reward", "turns", "tokens", "workflow", "failed", "tasks")
"""Names in metrics of an evaluation, as in eval/reward/mean."""
_PER_ENVIRONMENT = ("workflow", "rewards")
"""Keys of `eval` that each environment has itself."""


def check_shadow(config: RunSettings) -> None:
    """Raise ValueError unless shadow steps are used, and can be taken."""
    if config.stages:
        return
    if "shadow" not in config.services:
        if changed_keys(config.shadow):
            raise ValueError("shadow is not used: no environment of this run needs it; leave it out")
        return
    if config.mode in ("explore", "bench"):
        raise ValueError(
            f"mode {config.mode} has no policy in training, so no shadow steps; set mode to both, or leave out the "
            "environments that need them"
        )


def check_environments(config: RunSettings) -> None:
    """Raise ValueError unless the environments fit each other and the other sections of the run."""
    if config.stages or not config.environments:
        return
    if unused := [key for key in ("tasks", "workflow", "rewards") if key in changed_keys(config)]:
        raise ValueError(
            f"{unused[0]} is not used with environments, which have their own; move it into one of type tasks"
        )
    _check_names(config)
    _check_training(config)
    _check_evaluation(config)


def _check_names(config: RunSettings) -> None:
    titles = [each.title for each in config.environments]
    if twice := [title for title, count in Counter(titles).items() if count > 1]:
        raise ValueError(f"two environments are called {twice[0]}; give each a name of its own")
    for title in titles:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", title) or title in _IN_METRICS:
            raise ValueError(
                f"environment {title}: the name is part of metrics; set name to letters, digits, _, . and -, and to "
                f"none of {', '.join(_IN_METRICS)}"
            )


def _check_training(config: RunSettings) -> None:
    if not config.uses_rollouts or config.mode == "bench":
        return
    if config.epochs is not None and len(config.trained) > 1:
        raise ValueError("epochs is not used with several environments, which differ in size; set steps")
    advantage = config.algorithm.advantage
    for each in config.trained if config.samples else ():
        if advantage.reads_rewards and not each.provides_rewards:
            raise ValueError(f"environment {each.title}: no reward function scores the rollouts; set its rewards")
        if advantage.reads_states and not each.provides_states:
            raise ValueError(
                f"environment {each.title}: {advantage.type} compares turns by state, and this environment sets none; "
                "use algorithm.advantage {type: step_wise_grpo}, which compares whole rollouts"
            )
        if fault := config.algorithm.sampling_fault(each.sampling_of(config.sampling)):
            raise ValueError(f"environment {each.title}: {fault}")


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
    evaluated = [each for each in config.environments if each.evaluates]
    if unknown := sorted(settings.sources.keys() - {each.title for each in evaluated}):
        raise ValueError(f"eval.sources.{unknown[0]}: no environment with held-out tasks has this name")
    for each in config.environments:
        if not each.weight:
            _check_only_evaluated(each, settings)
    for each in evaluated:
        if not each.provides_rewards:
            raise ValueError(f"environment {each.title}: no reward function scores the answers; set its rewards")
    if "threshold" in changed_keys(settings) and evaluated and all(each.says_correct for each in evaluated):
        raise ValueError(
            "eval.threshold is not used: the rewards of every environment say what is right; leave out threshold"
        )


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
