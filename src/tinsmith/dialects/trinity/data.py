"""Trinity's tasksets as `tasks` of ours, with how they are sampled and evaluated.

Leaves out what is asked and what an answer is worth (`work.py`), and data to learn from (`lessons.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tinsmith.dialects.base import Becoming, idle
from tinsmith.dialects.trinity.algorithm import SUPERVISED
from tinsmith.dialects.trinity.keys import TrinityFile
from tinsmith.dialects.trinity.keys_buffer import Asked, Buffer, Format, LessonFormat, Selector, Taskset

INPUT = "buffer.explorer_input"
LINES, FILES = (".jsonl",), (".json", ".parquet", ".csv", ".arrow")

Located = tuple[str, Taskset]
"""A taskset and its key."""
T = TypeVar("T")


def training(file: TrinityFile) -> list[Located]:
    """The tasksets to train on."""
    given = file.buffer.explorer_input
    one = [(f"{INPUT}.taskset", given.taskset)] if given.taskset is not None else []
    return one + [(f"{INPUT}.tasksets[{at}]", taskset) for at, taskset in enumerate(given.tasksets)]


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """`tasks`, `sampling` and `eval`."""
    given, tasksets = file.buffer.explorer_input, training(file)
    supervised = file.algorithm.algorithm_type in SUPERVISED
    if given.taskset is not None and given.tasksets:
        becoming.fault(f"{INPUT}.tasksets", "taskset and tasksets are both set.", "Move the one into the other.")
    if not tasksets and not supervised and file.mode in ("both", "colocate", "explore"):
        becoming.fault(f"{INPUT}.taskset", "there is nothing to train on.", "Give at least one taskset.")
    if tasksets and not supervised:
        sources = [source(one, key, becoming) for key, one in tasksets]
        becoming.put("tasks.train", sources[0] if len(sources) == 1 else sources)
        becoming.put("tasks.order", order([(key, _selector(one)) for key, one in tasksets], becoming))
        _sampling(tasksets, becoming)
    for key, one in tasksets if supervised else ():
        idle(one, becoming, f"{key}.", f"{file.algorithm.algorithm_type} learns from data, and asks no tasks.")
    becoming.put("tasks.held_out", 0)
    if given.eval_tasksets:
        _evaluation(file, becoming)
    elif file.explorer.model_fields_set & {"eval_interval", "eval_on_startup"}:
        becoming.note("explorer.eval_interval, explorer.eval_on_startup: there are no eval_tasksets to try.")


def source(one: Asked | Buffer, key: str, becoming: Becoming) -> dict[str, Any]:
    """Where rows come from, and which of their fields are what."""
    if not one.path:
        becoming.fault(f"{key}.path", "it is not set.", "Name a dataset of the hub, a folder, a file or a database.")
        return {}
    fields = _fields(one.format)
    if one.storage_type == "sql":
        if not one.name:
            becoming.fault(f"{key}.name", "it is not set.", "Name the table.")
        return {"type": "sql", "url": one.path, "table": one.name, **fields}
    suffix = Path(one.path).suffix
    if suffix in LINES:
        return {"type": "jsonl", "path": one.path, **fields}
    if suffix in FILES:
        return {"type": "files", "path": one.path, **fields}
    subset = {"subset": one.subset_name} if one.subset_name else {}
    return {"type": "hub", "name": one.path, **subset, "split": one.split, **fields}


def _fields(format: Format | LessonFormat) -> dict[str, Any]:
    given = {
        "system": format.system_prompt,
        "system_key": format.system_prompt_key,
        "reply_prefix": format.reply_prefix,
    }
    keys = {"prompt": f"{{{format.prompt_key}}}", "answer": f"{{{format.response_key}}}"}
    return {**keys, **{name: value for name, value in given.items() if value}}


def same(tasksets: Sequence[tuple[str, T]], read: Callable[[T], Any], what: str, becoming: Becoming) -> Any:
    """What must be alike in every taskset, since a run has one of it."""
    values = [read(one) for _, one in tasksets]
    if any(value != values[0] for value in values):
        key = tasksets[-1][0]
        becoming.fault(f"{key}.{what}", "it is another in another taskset; a run has one.", "Make them alike.")
    return values[0]


def _selector(one: Taskset) -> Selector:
    return one.task_selector or one.data_selector


def order(selectors: Sequence[tuple[str, Selector]], becoming: Becoming) -> dict[str, Any]:
    """Which rows come when; a run has one order for all its sources."""
    if any(one != selectors[0][1] for _, one in selectors):
        becoming.fault(f"{selectors[-1][0]}.data_selector", "it is another in another taskset.", "Make them alike.")
    selector = selectors[0][1]
    kind, key = selector.selector_type or "sequential", f"{selectors[0][0]}.data_selector"
    by, options = list(selector.feature_keys), dict(selector.kwargs)
    match kind:
        case "sequential" | "shuffle" | "random":
            return {"type": kind}
        case "offline_easy2hard":
            if not by:
                becoming.fault(f"{key}.feature_keys", "nothing says how hard a row is.", "Name a field with a number.")
            return {"type": "easy_to_hard", "by": by, **_known(options, ("descending",), key, becoming)}
        case "difficulty_based":
            known = ("m", "lamb", "rho", "target_reward", "tau", "do_sample")
            settings = _known(options, known, key, becoming)
            if "do_sample" in settings:
                settings["sample"] = settings.pop("do_sample")
            return {"type": "difficulty", "by": by, **settings}
    cure = "It is one of sequential, shuffle, random, offline_easy2hard, difficulty_based."
    becoming.fault(f"{key}.selector_type", f"there is no '{kind}'.", cure)
    return {"type": "sequential"}


def _known(options: dict[str, Any], known: Sequence[str], key: str, becoming: Becoming) -> dict[str, Any]:
    for name in options.keys() - set(known):
        becoming.fault(f"{key}.kwargs.{name}", "there is no such option.", f"Known here: {', '.join(known)}.")
    return {name: value for name, value in options.items() if name in known}


def _sampling(tasksets: Sequence[Located], becoming: Becoming) -> None:
    """What the tasks say lies over what the model says."""
    arguments = same(tasksets, lambda one: one.rollout_args, "rollout_args", becoming)
    for name in ("temperature", "top_p", "max_tokens"):
        if (value := arguments.__dict__[name]) is not None:
            becoming.put(f"sampling.{name}", value)
    if "top_k" in arguments.model_fields_set:
        becoming.put("sampling.top_k", arguments.top_k)


def _evaluation(file: TrinityFile, becoming: Becoming) -> None:
    given = file.buffer.explorer_input.eval_tasksets
    located = [(f"{INPUT}.eval_tasksets[{at}]", one) for at, one in enumerate(given)]
    named = {one.name or f"eval{at}": source(one, key, becoming) for at, (key, one) in enumerate(located)}
    if len(named) < len(located):
        becoming.fault(f"{INPUT}.eval_tasksets", "two have one name.", "Give each a name of its own.")
    becoming.put("tasks.eval", named)
    every = file.explorer.eval_interval
    interval = file.synchronizer.explorer_sync_interval or file.synchronizer.sync_interval
    if every > 0 and interval > 0 and every % interval:
        every = max(interval, every - every % interval)
        what = f"explorer.eval_interval: {every}, so that it is a multiple of the interval of synchronisation."
        becoming.note(what)
    becoming.put("eval.every", max(0, every))
    becoming.put("eval.before", file.explorer.eval_on_startup)
    becoming.put("eval.after", False)
    repeats = same(located, lambda one: one.repeat_times, "repeat_times", becoming)
    arguments = same(located, lambda one: one.rollout_args, "rollout_args", becoming)
    temperature = file.model.temperature if arguments.temperature is None else arguments.temperature
    becoming.put("eval.num_samples", repeats)
    becoming.put("eval.temperature", temperature)
    if arguments.max_tokens is not None:
        becoming.put("eval.max_tokens", arguments.max_tokens)
    if repeats > 1 and temperature == 0:
        cure = "Set rollout_args.temperature above 0, or repeat_times to 1."
        becoming.fault(f"{located[0][0]}.repeat_times", "greedy answers are all the same.", cure)
