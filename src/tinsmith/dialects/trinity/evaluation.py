"""Trinity's `eval_tasksets` as `tasks.eval` and `eval` of ours, and mode bench.

What all of them have alike stands in `eval` itself, what one has otherwise under its name in `eval.sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.dialects.base import Becoming
from tinsmith.dialects.trinity.data import INPUT, asked
from tinsmith.dialects.trinity.schema import TrinityFile
from tinsmith.dialects.trinity.schema_buffer import EvalTaskset
from tinsmith.dialects.trinity.workflows import worked

OVER_TRAINING = ("top_p", "top_k", "max_tokens", "workflow")
"""What training's counts for where evaluation has no other."""


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """`tasks.eval`, `eval` and `bench`."""
    given = file.buffer.explorer_input.eval_tasksets
    becoming.put("tasks.held_out", 0)
    if file.mode == "bench":
        _bench(file, becoming)
    if file.mode == "explore" and given:
        becoming.note(f"{INPUT}.eval_tasksets: the process of mode train evaluates; they count in its file.")
    elif given:
        _tasks(file, becoming)
        _when(file, becoming)
    elif file.explorer.model_fields_set & {"eval_interval", "eval_on_startup"}:
        becoming.note("explorer.eval_interval, explorer.eval_on_startup: there are no eval_tasksets to try.")


def _bench(file: TrinityFile, becoming: Becoming) -> None:
    becoming.put("bench.base", file.explorer.eval_on_startup)
    becoming.put("bench.of_run", "last" if file.explorer.bench_on_latest_checkpoint else "all")
    if not file.buffer.explorer_input.eval_tasksets:
        becoming.fault(f"{INPUT}.eval_tasksets", "mode bench tries them, and there are none.", "Give at least one.")


def _tasks(file: TrinityFile, becoming: Becoming) -> None:
    located = [(f"{INPUT}.eval_tasksets[{at}]", one) for at, one in enumerate(file.buffer.explorer_input.eval_tasksets)]
    names = [one.name or f"eval{at}" for at, (_, one) in enumerate(located)]
    if len({*names}) < len(names):
        becoming.fault(f"{INPUT}.eval_tasksets", "two have one name.", "Give each a name of its own.")
        return
    usual = (_usual(file), file.buffer.explorer_input.default_reward_fn_type)
    becoming.put(
        "tasks.eval",
        {name: asked(one, key, becoming, *usual) for name, (key, one) in zip(names, located, strict=True)},
    )
    tried = {name: _tried(file, key, one, becoming) for name, (key, one) in zip(names, located, strict=True)}
    first = tried[names[0]]
    alike = {key: value for key, value in first.items() if all(one.get(key) == value for one in tried.values())}
    for key, value in alike.items():
        becoming.put(f"eval.{key}", value)
    if others := {name: _without(one, alike) for name, one in tried.items() if _without(one, alike)}:
        becoming.put("eval.sources", others)


def _without(one: Mapping[str, Any], alike: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in one.items() if key not in alike}


def _usual(file: TrinityFile) -> str | None:
    given = file.buffer.explorer_input
    return given.default_eval_workflow_type or given.default_workflow_type


def _tried(file: TrinityFile, key: str, one: EvalTaskset, becoming: Becoming) -> dict[str, Any]:
    """What stands in `eval` for one taskset: only what training's does not say already."""
    arguments, model, rollout = one.rollout_args, file.model, file.explorer.rollout_model
    given = {
        "temperature": model.temperature if arguments.temperature is None else arguments.temperature,
        "top_p": model.top_p if arguments.top_p is None else arguments.top_p,
        "top_k": arguments.top_k if "top_k" in arguments.model_fields_set else model.top_k,
        "max_tokens": arguments.max_tokens or rollout.max_response_tokens or model.max_response_tokens,
    }
    found: dict[str, Any] = {"num_samples": one.repeat_times, **given}
    if one.repeat_times > 1 and given["temperature"] == 0:
        cure = "Set rollout_args.temperature above 0, or repeat_times to 1."
        becoming.fault(f"{key}.repeat_times", "greedy answers are all the same.", cure)
    if (work := worked(file, [(key, one)], _usual(file), becoming)) is not None:
        found |= {"workflow": work[0], "rewards": work[1]}
    training = {**becoming.settings.get("sampling", {}), "workflow": becoming.settings.get("workflow")}
    if found.get("rewards") == becoming.settings.get("rewards"):
        del found["rewards"]
    return {name: value for name, value in found.items() if name not in OVER_TRAINING or value != training.get(name)}


def _when(file: TrinityFile, becoming: Becoming) -> None:
    every = file.explorer.eval_interval
    interval = file.synchronizer.explorer_sync_interval or file.synchronizer.sync_interval
    if every > 0 and interval > 0 and every % interval:
        every = max(interval, every - every % interval)
        what = f"explorer.eval_interval: {every}, so that it is a multiple of the interval of synchronisation."
        becoming.note(what)
    becoming.put("eval.every", max(0, every))
    becoming.put("eval.before", file.explorer.eval_on_startup)
    becoming.put("eval.after", False)
