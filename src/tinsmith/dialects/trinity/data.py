"""Trinity's tasksets as `tasks` of ours, with how they are sampled.

Leaves out what is asked and what an answer is worth (`work.py`), what is held out (`evaluation.py`), and data to learn
from (`lessons.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tinsmith.dialects.base import Becoming, idle
from tinsmith.dialects.trinity.algorithm import SUPERVISED
from tinsmith.dialects.trinity.name_tables import READING, WORKFLOWS
from tinsmith.dialects.trinity.schema import TrinityFile
from tinsmith.dialects.trinity.schema_buffer import Asked, Buffer, Format, LessonFormat, Selector, Taskset

INPUT = "buffer.explorer_input"
DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+asyncpg": "postgresql+psycopg",
    "sqlite+aiosqlite": "sqlite",
}
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
    """`tasks` to train on, and `sampling`."""
    given, tasksets = file.buffer.explorer_input, training(file)
    name = file.algorithm.algorithm_type
    if given.taskset is not None and given.tasksets:
        becoming.fault(f"{INPUT}.tasksets", "taskset and tasksets are both set.", "Move the one into the other.")
    why = "mode bench trains nothing." if file.mode == "bench" else f"{name} learns from data, and asks no tasks."
    if file.mode == "bench" or name in SUPERVISED:
        for key, one in tasksets:
            idle(one, becoming, f"{key}.", why)
        return
    if not tasksets and file.mode != "train":
        becoming.fault(f"{INPUT}.taskset", "there is nothing to train on.", "Give at least one taskset.")
    if tasksets:
        usual = (given.default_workflow_type, given.default_reward_fn_type)
        sources = [asked(one, key, becoming, *usual) for key, one in tasksets]
        becoming.put("tasks.train", sources[0] if len(sources) == 1 else sources)
        becoming.put("tasks.order", order([(key, _selector(one)) for key, one in tasksets], becoming))
        _sampling(tasksets, becoming)


def asked(one: Asked, key: str, becoming: Becoming, workflow: str | None, reward: str | None) -> dict[str, Any]:
    """A source of tasks; workflow and reward are those of a taskset that names none."""
    found, name = source(one, key, becoming), one.default_workflow_type or workflow
    if extra := _extra(name):
        found["extra"] = extra
    work = WORKFLOWS.get((name or "").removeprefix("async_"))
    judge = one.default_reward_fn_type or reward or (work.reward if work else "")
    if "response_key" not in one.format.model_fields_set and judge not in READING:
        found["answer_optional"] = True
    return found


def source(one: Asked | Buffer, key: str, becoming: Becoming) -> dict[str, Any]:
    """Where rows come from, and which of their fields are what."""
    if not one.path:
        becoming.fault(f"{key}.path", "it is not set.", "Name a dataset of the hub, a folder, a file or a database.")
        return {}
    fields, suffix = _fields(one.format), Path(one.path).suffix
    if one.storage_type == "sql" or suffix in (*LINES, *FILES):
        for name in sorted({"split", "subset_name"} & one.model_fields_set):
            becoming.note(f"{key}.{name}: it counts for datasets; a file or a table is read whole.")
    if one.storage_type == "sql":
        if not one.name:
            becoming.fault(f"{key}.name", "it is not set.", "Name the table.")
        return {"type": "sql", "url": database(one.path), "table": one.name, **fields}
    if suffix in LINES:
        return {"type": "jsonl", "path": one.path, **fields}
    if suffix in FILES:
        return {"type": "files", "path": one.path, **fields}
    subset = {"subset": one.subset_name} if one.subset_name else {}
    return {"type": "hub", "name": one.path, **subset, "split": one.split, **fields}


def database(url: str) -> str:
    """By the driver that is here; Trinity's are others."""
    scheme, colon, rest = url.partition("://")
    return DRIVERS.get(scheme, scheme) + colon + rest


def _extra(workflow: str | None) -> list[str]:
    """Fields that the workflow reads; one of the user's own may read any."""
    if workflow is None:
        return []
    known = WORKFLOWS.get(workflow.removeprefix("async_"))
    return list(known.extra) if known else ["*"]


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
