"""Trinity's workflows and reward functions: `workflow` and `rewards`.

A name is one of Trinity's (`name_tables`), one that a file of the plugin folder registers, or a dotted path.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from tinsmith.dialects.base import NOTHING, Translation, did_you_mean, fault, note, settings, translates
from tinsmith.integrations.trinity.files.algorithm import advantage_type
from tinsmith.integrations.trinity.files.arguments import merge_arguments
from tinsmith.integrations.trinity.files.data import INPUT, common_value, training_tasksets
from tinsmith.integrations.trinity.files.name_tables import (
    DISTILLING,
    JUDGE,
    PLAIN,
    REWARDS,
    SUPERVISED,
    WORKFLOWS,
    WorkflowName,
    unsupported_workflow,
)
from tinsmith.integrations.trinity.files.prompts import R1, THINK_BOXED
from tinsmith.integrations.trinity.files.schema import TrinityFile
from tinsmith.integrations.trinity.files.schema_buffer import ExplorerInput, TasksetBase
from tinsmith.integrations.trinity.files.schema_runtime import AuxiliaryModel, ExternalJudge
from tinsmith.rl.plugins import Names, import_object
from tinsmith.rl.workflows.multi_turn import Environment

Settings = dict[str, Any]
_OWN_CODE = "Code of your own needs --plugin-dir: docs/from/trinity.md."
_IMPORT_FIX = "Set --plugin-dir to its folder, or install its package."


class WorkflowAndRewards(NamedTuple):
    """Our settings of a workflow and of its rewards."""

    workflow: Settings
    rewards: list[Settings]


def translate(file: TrinityFile, plugins: Names) -> Translation:
    """`workflow` and `rewards` of training."""
    tasks, tasksets = file.buffer.explorer_input, training_tasksets(file)
    if file.algorithm.algorithm_type in SUPERVISED or file.mode == "bench" or not tasksets:
        return NOTHING
    needs_reward = advantage_type(file) not in DISTILLING
    result, messages = workflow_and_rewards(
        file, tasksets, tasks.default_workflow_type, plugins, needs_reward=needs_reward
    )
    return messages + (settings(result._asdict()) if result else NOTHING)


@translates(TasksetBase, default_workflow_type="workflow", default_reward_fn_type="rewards")
@translates(ExplorerInput, default_workflow_type="workflow", default_reward_fn_type="rewards")
def workflow_and_rewards(
    file: TrinityFile,
    tasksets: Sequence[tuple[str, TasksetBase]],
    default: str | None,
    plugins: Names,
    *,
    needs_reward: bool = True,
) -> tuple[WorkflowAndRewards | None, Translation]:
    """The workflow and rewards that these tasksets share, or None; and notes and faults.

    `default` names the workflow of tasksets that name none. `needs_reward` says whether having no reward is a fault.
    """
    key, taskset = tasksets[0]
    own, result = common_value(tasksets, lambda taskset: taskset.default_workflow_type, "default_workflow_type")
    reward, more = common_value(tasksets, lambda taskset: taskset.default_reward_fn_type, "default_reward_fn_type")
    _, arguments = common_value(
        tasksets, lambda taskset: (taskset.workflow_args, taskset.reward_fn_args), "workflow_args"
    )
    result += more + arguments
    name, place = own or default or "simple_workflow", f"{key if own else INPUT}.default_workflow_type"
    trinity = WORKFLOWS.get(name.removeprefix("async_"))
    workflow, of_reward, messages = _workflow(name, place, key, taskset, plugins)
    result += messages
    if workflow is None:
        return None, result
    reward = reward or file.buffer.explorer_input.default_reward_fn_type or (trinity.reward if trinity else "")
    if trinity and workflow.get("system") == R1 and not _gets_math_prompt(reward, tasksets):
        workflow = {"type": PLAIN.type}
    if trinity and not (reward or needs_reward):
        return WorkflowAndRewards(workflow, []), result
    rewards, messages = _rewards(file, reward, key, taskset, trinity, plugins)
    result += messages
    if rewards is None:
        return None, result
    rewards = [{**entry, **of_reward} if entry["type"] == "math_boxed" else entry for entry in rewards]
    return WorkflowAndRewards(workflow, rewards), result


def _gets_math_prompt(reward: str | None, tasksets: Sequence[tuple[str, TasksetBase]]) -> bool:
    """Whether math_workflow adds its system message: only with its own reward, and where no system_prompt is set."""
    return reward == WORKFLOWS["math_workflow"].reward and any(
        taskset.format.system_prompt is None for _, taskset in tasksets
    )


@translates(TasksetBase, workflow_args="workflow; arguments of your own code too")
def _workflow(
    name: str, place: str, key: str, taskset: TasksetBase, plugins: Names
) -> tuple[Settings | None, Settings, Translation]:
    """The workflow or None, settings for its reward, and notes and faults."""
    trinity = WORKFLOWS.get(name.removeprefix("async_"))
    if trinity is None:
        workflow, messages = _own_workflow(name, place, taskset, plugins)
        return workflow, {}, messages
    workflow, of_reward, messages = merge_arguments(trinity.component, taskset.workflow_args, f"{key}.workflow_args")
    if of_reward.get("think"):
        workflow["system"] = THINK_BOXED
    return workflow, of_reward, messages


def _own_workflow(name: str, key: str, taskset: TasksetBase, plugins: Names) -> tuple[Settings | None, Translation]:
    """A workflow of the plugin folder, or at a dotted path."""
    if ("workflow", name) in plugins:
        return {"type": name, **taskset.workflow_args}, NOTHING
    module, dot, attribute = name.rpartition(".")
    if not dot:
        candidates = [*WORKFLOWS, *(plugin for kind, plugin in plugins if kind == "workflow")]
        fix = unsupported_workflow(name) or f"{did_you_mean(name, candidates)} {_OWN_CODE}"
        return None, fault(key, f"there is no workflow '{name}' here.", fix)
    path = f"{module}:{attribute}"
    try:
        code = import_object(path)
    except ValueError as error:
        return None, fault(key, f"{error}.", _IMPORT_FIX)
    arguments = {"args": dict(taskset.workflow_args)} if taskset.workflow_args else {}
    return {"type": _workflow_type(code), "path": path, **arguments}, NOTHING


def _workflow_type(code: Any) -> str:
    """multi_turn for an environment, agent for (task, client, model), custom for (task, talk)."""
    if isinstance(code, type):
        return "multi_turn" if issubclass(code, Environment) else "custom"
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(code).parameters.values() if callable(code) else ()
    required = [
        parameter for parameter in parameters if parameter.kind in plain and parameter.default is parameter.empty
    ]
    return "agent" if len(required) == 3 else "custom"


@translates(TasksetBase, reward_fn_args="rewards; arguments of your own code too")
def _rewards(
    file: TrinityFile, name: str, key: str, taskset: TasksetBase, trinity: WorkflowName | None, plugins: Names
) -> tuple[list[Settings] | None, Translation]:
    """The rewards, or None where the file's are invalid. A workflow of the user's own needs none."""
    arguments = taskset.reward_fn_args
    place = f"{key if taskset.default_reward_fn_type else INPUT}.default_reward_fn_type"
    if name == JUDGE:
        return _judge(file, trinity, place)
    if ("reward", name) in plugins:
        return [{"type": name, **arguments}], NOTHING
    if name in REWARDS:
        reward, length, messages = merge_arguments(REWARDS[name], arguments, f"{key}.reward_fn_args")
        penalty, more = _length_penalty(length, f"{key}.reward_fn_args")
        return [reward, *penalty], messages + more
    if "." in name:
        module, _, attribute = name.rpartition(".")
        path = f"{module}:{attribute}"
        try:
            import_object(path)
        except ValueError as error:
            return None, fault(place, f"{error}.", _IMPORT_FIX)
        return [{"type": "custom", "path": path, "args": dict(arguments)}], NOTHING
    if name:
        candidates = [*REWARDS, *(plugin for kind, plugin in plugins if kind == "reward")]
        fix = f"{did_you_mean(name, candidates)} {_OWN_CODE}"
        return None, fault(place, f"there is no reward '{name}' here.", fix)
    if trinity is None:
        return [], NOTHING
    return None, fault(place, "there is no reward.", f"Set one of {', '.join(REWARDS)}.")


@translates(
    AuxiliaryModel,
    max_response_tokens="max_tokens of a judge",
    enable_thinking="chat_template_values.enable_thinking of a judge",
)
@translates(
    ExternalJudge,
    enable="base_url and key_env of a judge",
    base_url_env="base_url of a judge: the value of this environment variable",
    api_key_env="key_env of a judge",
    model_name="model of a judge; if not set, model_path",
)
def _judge(file: TrinityFile, trinity: WorkflowName | None, key: str) -> tuple[list[Settings] | None, Translation]:
    """A reward by the first auxiliary model."""
    models, result = file.explorer.auxiliary_models, NOTHING
    if not (models and models[0].model_path):
        fix = "Name a model of the server in explorer.auxiliary_models, or set default_reward_fn_type."
        return None, fault(key, "the workflow needs another model as a judge, and there is none.", fix)
    model, external = models[0], models[0].external_model_config
    judge: Settings = {"type": "judge", "model": model.model_path}
    if external.enable:
        url = os.environ.get(external.base_url_env, "")
        if not url:
            place = "explorer.auxiliary_models[0].external_model_config.base_url_env"
            problem = f"{external.base_url_env} is not set."
            result += fault(place, problem, "Set it to the URL of the judge's service.")
        judge |= {"model": external.model_name or model.model_path, "base_url": url, "key_env": external.api_key_env}
    if model.max_response_tokens:
        judge["max_tokens"] = model.max_response_tokens
    if model.enable_thinking is not None:
        judge["chat_template_values"] = {"enable_thinking": model.enable_thinking}
    if trinity and trinity.rubric:
        judge["rubric_key"] = trinity.rubric
    return [judge], result


def _length_penalty(arguments: Settings, key: str) -> tuple[list[Settings], Translation]:
    enabled = arguments.pop("overlong", False)
    if not enabled:
        text = f"{key}: the keys of the length penalty have an effect only with enable_overlong_penalty: true."
        return [], note(text) if arguments else NOTHING
    penalty = [{"type": "overlong", **arguments}]
    if {"max_tokens", "margin"} <= arguments.keys():
        return penalty, NOTHING
    fix = "Set max_response_length and cache_length as well."
    return penalty, fault(f"{key}.enable_overlong_penalty", "no key says which length is too long.", fix)
