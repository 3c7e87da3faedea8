"""What Trinity's workflows ask and what its reward functions are worth, as `workflow` and `rewards` of ours.

A name is one of Trinity's (`works.py`), one that a file of the plugin folder marks, or a dotted path. Leaves out where
tasks come from (`data.py`) and how they are evaluated (`evaluation.py`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

from tinsmith.dialects.base import Becoming
from tinsmith.dialects.trinity.algorithm import SUPERVISED, TAUGHT, without_states
from tinsmith.dialects.trinity.arguments import laid_over, near
from tinsmith.dialects.trinity.data import INPUT, same, training
from tinsmith.dialects.trinity.name_tables import JUDGE, REWARDS, THINK_BOXED, WORKFLOWS, Work, elsewhere
from tinsmith.dialects.trinity.schema import TrinityFile
from tinsmith.dialects.trinity.schema_buffer import Asked
from tinsmith.rl.plugins import thing_at
from tinsmith.rl.workflows.multi_turn import Environment

Worked = tuple[dict[str, Any], list[dict[str, Any]]]
"""A workflow and rewards."""
_STATELESS = ("single_turn", "math", "agent")
"""Types of ours whose turns have no states."""


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """`workflow` and `rewards` of training."""
    given, asked = file.buffer.explorer_input, training(file)
    if file.algorithm.algorithm_type in SUPERVISED or file.mode == "bench":
        return
    needed = becoming.settings.get("algorithm", {}).get("advantage", {}).get("type") not in TAUGHT
    found = worked(file, asked, given.default_workflow_type, becoming, needed=needed) if asked else None
    if found is not None:
        becoming.put("workflow", found[0])
        becoming.put("rewards", found[1])
        if found[0]["type"] in _STATELESS:
            without_states(becoming)


def worked(
    file: TrinityFile,
    tasksets: Sequence[tuple[str, Asked]],
    usual: str | None,
    becoming: Becoming,
    *,
    needed: bool = True,
) -> Worked | None:
    """The workflow and the rewards of these tasksets, which are alike; None where there are no right ones.

    `needed`: whether something must say what a reply is worth.
    """
    key, one = tasksets[0]
    own = same(tasksets, lambda one: one.default_workflow_type, "default_workflow_type", becoming)
    judged = same(tasksets, lambda one: one.default_reward_fn_type, "default_reward_fn_type", becoming)
    same(tasksets, lambda one: (one.workflow_args, one.reward_fn_args), "workflow_args", becoming)
    name, at = own or usual or "simple_workflow", f"{key if own else INPUT}.default_workflow_type"
    work, to_reward = WORKFLOWS.get(name.removeprefix("async_")), dict[str, Any]()
    if work is not None:
        workflow = laid_over(work.part, one.workflow_args, f"{key}.workflow_args", to_reward, becoming)
        if to_reward.get("think"):
            workflow["system"] = THINK_BOXED
    elif (workflow := _own_workflow(name, at, one, becoming)) is None:
        return None
    judge = judged or file.buffer.explorer_input.default_reward_fn_type or (work.reward if work else "")
    rewards = [] if work and not (judge or needed) else _rewards(file, judge, key, one, work, becoming)
    if rewards is None:
        return None
    for reward in rewards:
        if reward["type"] == "math_boxed":
            reward |= to_reward
    return workflow, rewards


def _own_workflow(name: str, key: str, one: Asked, becoming: Becoming) -> dict[str, Any] | None:
    """One of the plugin folder, or of a dotted path."""
    if ("workflow", name) in becoming.plugins:
        return {"type": name, **one.workflow_args}
    module, dot, attribute = name.rpartition(".")
    if not dot:
        known = [*WORKFLOWS, *(plugin for kind, plugin in becoming.plugins if kind == "workflow")]
        cure = elsewhere(name) or f"{near(name, known)} One of your own wants --plugin-dir: docs/guides/trinity.md."
        becoming.fault(key, f"there is no workflow '{name}' here.", cure)
        return None
    path = f"{module}:{attribute}"
    if (thing := _found(path, key, becoming)) is None:
        return None
    args = {"args": dict(one.workflow_args)} if one.workflow_args else {}
    return {"type": _form(thing), "path": path, **args}


def _found(path: str, key: str, becoming: Becoming) -> Any:
    """What stands there; None where nothing does."""
    try:
        return thing_at(path)
    except ValueError as error:
        becoming.fault(key, f"{error}.", "Give its folder as --plugin-dir, or install its package.")
        return None


def _form(thing: Any) -> str:
    """An environment, an agent (task, client, model), or what is called with (task, talk)."""
    if isinstance(thing, type):
        return "multi_turn" if issubclass(thing, Environment) else "custom"
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = inspect.signature(thing).parameters.values() if callable(thing) else ()
    return "agent" if sum(one.kind in plain and one.default is one.empty for one in wanted) == 3 else "custom"


def _rewards(
    file: TrinityFile, judge: str, place: str, one: Asked, work: Work | None, becoming: Becoming
) -> list[dict[str, Any]] | None:
    """None where there are no right ones; of a workflow of one's own, none are needed."""
    key, args = f"{place}.reward_fn_args", one.reward_fn_args
    at = f"{place if one.default_reward_fn_type else INPUT}.default_reward_fn_type"
    if judge == JUDGE:
        return _judged(file, work, at, becoming)
    if ("reward", judge) in becoming.plugins:
        return [{"type": judge, **args}]
    if judge in REWARDS:
        beside: dict[str, Any] = {}
        found = [laid_over(REWARDS[judge], args, key, beside, becoming)]
        return found + _overlong(beside, key, becoming)
    if "." in judge:
        module, _, attribute = judge.rpartition(".")
        path = f"{module}:{attribute}"
        return [{"type": "custom", "path": path, "args": dict(args)}] if _found(path, at, becoming) else None
    if judge:
        known = [*REWARDS, *(plugin for kind, plugin in becoming.plugins if kind == "reward")]
        cure = f"{near(judge, known)} One of your own wants --plugin-dir: docs/guides/trinity.md."
        becoming.fault(at, f"there is no reward '{judge}' here.", cure)
        return None
    if work is None:
        return []
    becoming.fault(at, "nothing says what a reply is worth.", f"Set one of {', '.join(REWARDS)}.")
    return None


def _judged(file: TrinityFile, work: Work | None, key: str, becoming: Becoming) -> list[dict[str, Any]] | None:
    models = file.explorer.auxiliary_models
    if not (models and models[0].model_path):
        cure = "Name a model of the server in explorer.auxiliary_models, or set default_reward_fn_type."
        becoming.fault(key, "another model judges here, and there is none.", cure)
        return None
    one, external = models[0], models[0].external_model_config
    judge: dict[str, Any] = {"type": "judge", "model": one.model_path}
    if external.enable:
        url = os.environ.get(external.base_url_env, "")
        if not url:
            place = "explorer.auxiliary_models[0].external_model_config.base_url_env"
            becoming.fault(
                place, f"{external.base_url_env} is not set.", "Set it to the address of the judge's service."
            )
        judge |= {"model": external.model_name or one.model_path, "base_url": url, "key_env": external.api_key_env}
    if one.max_response_tokens:
        judge["max_tokens"] = one.max_response_tokens
    if one.enable_thinking is not None:
        judge["chat_template_values"] = {"enable_thinking": one.enable_thinking}
    if work and work.rubric:
        judge["rubric_key"] = work.rubric
    return [judge]


def _overlong(beside: dict[str, Any], key: str, becoming: Becoming) -> list[dict[str, Any]]:
    wanted = beside.pop("overlong", False)
    if not wanted:
        if beside:
            becoming.note(f"{key}: what is said of length counts only with enable_overlong_penalty: true.")
        return []
    if not {"max_tokens", "margin"} <= beside.keys():
        cure = "Set max_response_length and cache_length as well."
        becoming.fault(f"{key}.enable_overlong_penalty", "nothing says how long is too long.", cure)
    return [{"type": "overlong", **beside}]
