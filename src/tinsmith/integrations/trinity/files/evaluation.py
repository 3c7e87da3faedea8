"""Trinity's `eval_tasksets`, and mode bench: `tasks.eval`, `eval` and `bench`.

Settings that all tasksets share stand in `eval` itself, and those of a single taskset under its name in `eval.sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.dialects.base import NOTHING, Translation, fault, note, settings, translates
from tinsmith.integrations.trinity.files.data import INPUT, task_source
from tinsmith.integrations.trinity.files.schema import TrinityFile
from tinsmith.integrations.trinity.files.schema_buffer import EvalRolloutArguments, EvalTaskset, ExplorerInput
from tinsmith.integrations.trinity.files.schema_runtime import Explorer
from tinsmith.integrations.trinity.files.workflows import workflow_and_rewards
from tinsmith.rl.plugins import Names

INHERITED = ("top_p", "top_k", "max_tokens", "workflow")
"""Settings that evaluation takes from training where it has none of its own."""


def translate(file: TrinityFile, plugins: Names, training: Mapping[str, Any]) -> Translation:
    """`tasks.eval`, `eval` and `bench`; `training` are the settings of the training side of the run."""
    tasksets = file.buffer.explorer_input.eval_tasksets
    result = settings({"tasks.held_out": 0})
    if file.mode == "bench":
        result += _bench(file)
    if file.mode == "explore" and tasksets:
        return result + note(f"{INPUT}.eval_tasksets: the process of mode train evaluates; set them in its file.")
    if tasksets:
        return result + _tasks(file, plugins, training) + _schedule(file)
    if file.explorer.model_fields_set & {"eval_interval", "eval_on_startup"}:
        result += note("explorer.eval_interval, explorer.eval_on_startup: there are no eval_tasksets to evaluate.")
    return result


@translates(Explorer, bench_on_latest_checkpoint="bench.of_run: last, or else all, in mode bench")
def _bench(file: TrinityFile) -> Translation:
    result = settings(
        {
            "bench.base": file.explorer.eval_on_startup,
            "bench.of_run": "last" if file.explorer.bench_on_latest_checkpoint else "all",
        }
    )
    if file.buffer.explorer_input.eval_tasksets:
        return result
    return result + fault(
        f"{INPUT}.eval_tasksets", "mode bench evaluates them, and there are none.", "Give at least one."
    )


def _tasks(file: TrinityFile, plugins: Names, training: Mapping[str, Any]) -> Translation:
    tasks = file.buffer.explorer_input
    keys = [f"{INPUT}.eval_tasksets[{index}]" for index in range(len(tasks.eval_tasksets))]
    names = [taskset.name or f"eval{index}" for index, taskset in enumerate(tasks.eval_tasksets)]
    if len(set(names)) < len(names):
        return fault(f"{INPUT}.eval_tasksets", "two entries have the same name.", "Give each a name of its own.")
    result, sources, by_name = NOTHING, dict[str, Any](), dict[str, dict[str, Any]]()
    for name, key, taskset in zip(names, keys, tasks.eval_tasksets, strict=True):
        sources[name], messages = task_source(taskset, key, _default_workflow(file), tasks.default_reward_fn_type)
        by_name[name], more = _settings_of(file, key, taskset, plugins, training)
        result += messages + more
    first = by_name[names[0]]
    shared = {key: value for key, value in first.items() if all(own.get(key) == value for own in by_name.values())}
    result += settings({"tasks.eval": sources}) + settings({f"eval.{key}": value for key, value in shared.items()})
    own = {name: _without(values, shared) for name, values in by_name.items() if _without(values, shared)}
    return result + (settings({"eval.sources": own}) if own else NOTHING)


def _without(values: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in shared}


@translates(ExplorerInput, default_eval_workflow_type="eval.workflow")
def _default_workflow(file: TrinityFile) -> str | None:
    tasks = file.buffer.explorer_input
    return tasks.default_eval_workflow_type or tasks.default_workflow_type


@translates(EvalTaskset, repeat_times="eval.num_samples")
@translates(EvalRolloutArguments, top_p="eval.top_p", top_k="eval.top_k")
def _settings_of(
    file: TrinityFile, key: str, taskset: EvalTaskset, plugins: Names, training: Mapping[str, Any]
) -> tuple[dict[str, Any], Translation]:
    """The settings in `eval` for one taskset, without those that training has already; and notes and faults."""
    arguments, model, rollout = taskset.rollout_args, file.model, file.explorer.rollout_model
    values: dict[str, Any] = {
        "num_samples": taskset.repeat_times,
        "temperature": model.temperature if arguments.temperature is None else arguments.temperature,
        "top_p": model.top_p if arguments.top_p is None else arguments.top_p,
        "top_k": arguments.top_k if "top_k" in arguments.model_fields_set else model.top_k,
        "max_tokens": arguments.max_tokens or rollout.max_response_tokens or model.max_response_tokens,
    }
    result = NOTHING
    if taskset.repeat_times > 1 and values["temperature"] == 0:
        fix = "Set rollout_args.temperature above 0, or repeat_times to 1."
        result += fault(f"{key}.repeat_times", "greedy replies are all the same.", fix)
    workflow, messages = workflow_and_rewards(file, [(key, taskset)], _default_workflow(file), plugins)
    if workflow is not None:
        values |= {"workflow": workflow.workflow, "rewards": workflow.rewards}
    inherited = {**training.get("sampling", {}), "workflow": training.get("workflow")}
    if values.get("rewards") == training.get("rewards"):
        values.pop("rewards", None)
    own = {name: value for name, value in values.items() if name not in INHERITED or value != inherited.get(name)}
    return own, result + messages


@translates(Explorer, eval_interval="eval.every", eval_on_startup="eval.before; bench.base in mode bench")
def _schedule(file: TrinityFile) -> Translation:
    every, result = file.explorer.eval_interval, NOTHING
    interval = file.synchronizer.explorer_sync_interval or file.synchronizer.sync_interval
    if every > 0 and interval > 0 and every % interval:
        every = max(interval, every - every % interval)
        result += note(f"explorer.eval_interval: {every}, rounded to a multiple of the synchronisation interval.")
    return result + settings(
        {"eval.every": max(0, every), "eval.before": file.explorer.eval_on_startup, "eval.after": False}
    )
