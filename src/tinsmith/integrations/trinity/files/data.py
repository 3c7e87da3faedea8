"""Trinity's tasksets, buffers and operators: `tasks`, `sampling`, `buffer` and `filters`.

Leaves out workflows and rewards (`workflows`), evaluation (`evaluation`) and demonstrations (`demonstrations`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

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
from tinsmith.integrations.trinity.files.arguments import Component, RenamedArgument, merge_arguments
from tinsmith.integrations.trinity.files.name_tables import NEED_ANSWER, SUPERVISED, WORKFLOWS
from tinsmith.integrations.trinity.files.schema import Operator, TrinityFile
from tinsmith.integrations.trinity.files.schema_buffer import (
    DataSelector,
    ExperienceBuffer,
    ReplayBuffer,
    RolloutArguments,
    StoredData,
    TaskFormat,
    Taskset,
    TasksetBase,
)

INPUT = "buffer.explorer_input"
BUFFER = "buffer.trainer_input.experience_buffer"
OPERATORS = "data_processor.experience_pipeline.operators"
DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+asyncpg": "postgresql+psycopg",
    "sqlite+aiosqlite": "sqlite",
}
"""Trinity's database drivers -> the ones used here."""
JSON_LINES, FILES = (".jsonl",), (".json", ".parquet", ".csv", ".arrow")
TWO_PROCESSES = ("explore", "train")
"""Modes in which two processes share one run."""
_DECAY = {"decay": RenamedArgument(("decay",))}
_LIMITED = Component(
    "linear_decay_limited",
    {**_DECAY, "use_count_limit": RenamedArgument(("limit",)), "sigma": RenamedArgument(("sigma",))},
)
PRIORITIES = {
    "linear_decay": Component("linear_decay", _DECAY),
    "decay_limit_randomization": _LIMITED,
    "linear_decay_use_count_control_randomization": _LIMITED,
}
THRESHOLD_FILTERS = {"reward_filter": ("reward", "low"), "reward_std_filter": ("reward_std", "threshold")}
PLAIN_FILTERS = {
    "dapo_dynamic_sampling": "reward_std",
    "mask_response_truncated": "cut",
    "invalid_reward_filter": "valid_reward",
}
UNSUPPORTED_OPERATORS = {
    "reward_shaping_mapper": "List further rewards, each with its weight, in a Tinsmith run file.",
    "data_juicer": "Score replies by rewards of your own.",
}

Located = tuple[str, Taskset]
"""A taskset with its key."""
T = TypeVar("T")


def training_tasksets(file: TrinityFile) -> list[Located]:
    """The tasksets to train on."""
    tasks = file.buffer.explorer_input
    single = [(f"{INPUT}.taskset", tasks.taskset)] if tasks.taskset is not None else []
    return single + [(f"{INPUT}.tasksets[{index}]", taskset) for index, taskset in enumerate(tasks.tasksets)]


def translate(file: TrinityFile) -> Translation:
    """`tasks` to train on, and `sampling`."""
    tasks, tasksets, name = file.buffer.explorer_input, training_tasksets(file), file.algorithm.algorithm_type
    result = NOTHING
    if tasks.taskset is not None and tasks.tasksets:
        problem = "taskset and tasksets are both set."
        result += fault(f"{INPUT}.tasksets", problem, "Move the one into the other.")
    if file.mode == "bench" or name in SUPERVISED:
        bench = "mode bench trains nothing."
        why = bench if file.mode == "bench" else f"{name} trains on demonstrations and samples no tasks."
        return result + combine(note_unused(taskset, f"{key}.", why) for key, taskset in tasksets)
    if not tasksets and file.mode != "train":
        result += fault(f"{INPUT}.taskset", "there is nothing to train on.", "Give at least one taskset.")
    if not tasksets:
        return result
    sources = []
    for key, taskset in tasksets:
        source, messages = task_source(taskset, key, tasks.default_workflow_type, tasks.default_reward_fn_type)
        result += messages
        sources.append(source)
    selectors = [(key, taskset.task_selector or taskset.data_selector) for key, taskset in tasksets]
    result += settings({"tasks.train": sources[0] if len(sources) == 1 else sources})
    return result + order("tasks.order", selectors) + _sampling(tasksets)


def task_source(
    taskset: TasksetBase, key: str, workflow: str | None, reward: str | None
) -> tuple[dict[str, Any], Translation]:
    """A source of tasks, with notes and faults; `workflow` and `reward` are for a taskset that names none."""
    source, messages = row_source(taskset, key)
    name = taskset.default_workflow_type or workflow
    if extra := _extra_fields(name):
        source["extra"] = extra
    trinity = WORKFLOWS.get((name or "").removeprefix("async_"))
    judge = taskset.default_reward_fn_type or reward or (trinity.reward if trinity else "")
    if "response_key" not in taskset.format.model_fields_set and judge not in NEED_ANSWER:
        source["answer_optional"] = True
    return source, messages


@translates(StoredData, path="tasks.*.name or path", split="tasks.*.split", subset_name="tasks.*.subset")
@translates(TasksetBase, storage_type="tasks.*.type")
def row_source(data: TasksetBase | ExperienceBuffer, key: str) -> tuple[dict[str, Any], Translation]:
    """Where rows come from and what their fields mean, with notes and faults."""
    if not data.path:
        fix = "Name a dataset of the hub, a folder, a file or a database."
        return {}, fault(f"{key}.path", "it is not set.", fix)
    messages, fields, suffix = NOTHING, _fields(data.format), Path(data.path).suffix
    if data.storage_type == "sql" or suffix in (*JSON_LINES, *FILES):
        for name in sorted({"split", "subset_name"} & data.model_fields_set):
            messages += note(f"{key}.{name}: it applies to datasets of the hub; a file or a table is read whole.")
    if data.storage_type == "sql":
        if not data.name:
            return {}, messages + fault(f"{key}.name", "it is not set.", "Name the table.")
        return {"type": "sql", "url": database_url(data.path), "table": data.name, **fields}, messages
    if suffix in JSON_LINES:
        return {"type": "jsonl", "path": data.path, **fields}, messages
    if suffix in FILES:
        return {"type": "files", "path": data.path, **fields}, messages
    subset = {"subset": data.subset_name} if data.subset_name else {}
    return {"type": "hub", "name": data.path, **subset, "split": data.split, **fields}, messages


def database_url(url: str) -> str:
    """The URL with a driver that is installed here."""
    scheme, colon, rest = url.partition("://")
    return DRIVERS.get(scheme, scheme) + colon + rest


def _extra_fields(workflow: str | None) -> list[str]:
    """Fields of a row that the workflow reads; a workflow of the user's own may read any."""
    if workflow is None:
        return []
    trinity = WORKFLOWS.get(workflow.removeprefix("async_"))
    return list(trinity.extra) if trinity else ["*"]


@translates(
    TaskFormat,
    prompt_key="tasks.*.prompt; a field may hold a whole chat",
    response_key="tasks.*.answer; if not set, rows may lack it where no reward reads it",
    system_prompt="tasks.*.system",
    system_prompt_key="tasks.*.system_key",
    reply_prefix="tasks.*.reply_prefix",
    image_key="tasks.*.images",
)
def _fields(form: TaskFormat) -> dict[str, Any]:
    optional = {
        "system": form.system_prompt,
        "system_key": form.system_prompt_key,
        "reply_prefix": form.reply_prefix,
        "images": form.image_key,
    }
    keys = {"prompt": f"{{{form.prompt_key}}}", "answer": f"{{{form.response_key}}}"}
    return {**keys, **{name: value for name, value in optional.items() if value}}


def common_value(tasksets: Sequence[tuple[str, T]], read: Callable[[T], Any], name: str) -> tuple[Any, Translation]:
    """The value that all tasksets share, with a fault if they differ: a run has only one."""
    values = [read(taskset) for _, taskset in tasksets]
    if all(value == values[0] for value in values):
        return values[0], NOTHING
    key = f"{tasksets[-1][0]}.{name}"
    return values[0], fault(key, "another taskset has a different value, and a run has one.", "Make them alike.")


@translates(DataSelector, selector_type="tasks.order", feature_keys="tasks.order", kwargs="tasks.order")
def order(to: str, selectors: Sequence[tuple[str, DataSelector]]) -> Translation:
    """The order of rows, set at key `to`; a run has one order for all its sources."""
    result, selector = NOTHING, selectors[0][1]
    if any(other != selector for _, other in selectors):
        problem = "another taskset has a different one, and a run has one."
        result += fault(f"{selectors[-1][0]}.data_selector", problem, "Make them alike.")
    kind, key = selector.selector_type or "sequential", f"{selectors[0][0]}.data_selector"
    by, options = list(selector.feature_keys), dict(selector.kwargs)
    match kind:
        case "sequential" | "shuffle" | "random":
            return result + settings({to: {"type": kind}})
        case "offline_easy2hard":
            if not by:
                problem = "no field gives the difficulty of a row."
                result += fault(f"{key}.feature_keys", problem, "Name a field with a number.")
            result += _unknown_options(options, ("descending",), key)
            return result + settings({to: {"type": "easy_to_hard", "by": by, **options}})
        case "difficulty_based":
            result += _unknown_options(options, ("m", "lamb", "rho", "target_reward", "tau", "do_sample"), key)
            if "do_sample" in options:
                options["sample"] = options.pop("do_sample")
            return result + settings({to: {"type": "difficulty", "by": by, **options}})
    fix = "It is one of sequential, shuffle, random, offline_easy2hard, difficulty_based."
    return result + fault(f"{key}.selector_type", f"there is no '{kind}'.", fix)


def _unknown_options(options: dict[str, Any], allowed: Sequence[str], key: str) -> Translation:
    return combine(
        fault(f"{key}.kwargs.{name}", "there is no such option.", f"Known here: {', '.join(allowed)}.")
        for name in options.keys() - set(allowed)
    )


@translates(
    RolloutArguments,
    temperature="sampling.temperature, eval.temperature",
    top_p="sampling.top_p",
    top_k="sampling.top_k",
    max_tokens="sampling.max_tokens, eval.max_tokens",
)
def _sampling(tasksets: Sequence[Located]) -> Translation:
    """Arguments of the tasks override those of the model."""
    arguments, result = common_value(tasksets, lambda taskset: taskset.rollout_args, "rollout_args")
    for name in ("temperature", "top_p", "max_tokens"):
        if (value := arguments.__dict__[name]) is not None:
            result += settings({f"sampling.{name}": value})
    if "top_k" in arguments.model_fields_set:
        result += settings({"sampling.top_k": arguments.top_k})
    return result


def rollout_buffer(file: TrinityFile, max_staleness: int | None) -> Translation:
    """`buffer`: where rollouts are stored, and which are trained on again."""
    own = file.buffer.trainer_input.experience_buffer or ExperienceBuffer()
    if file.algorithm.algorithm_type in SUPERVISED:
        return NOTHING
    if file.mode == "bench":
        return note_unused(own, f"{BUFFER}.", "mode bench trains nothing.")
    storage, result = _storage(file, own)
    if max_staleness is not None:
        storage["max_staleness"] = max_staleness
    replay, messages = _replay(own.replay_buffer or ReplayBuffer())
    capacity, more = _capacity(file, own, replays=bool(replay))
    if replay:
        storage["replay"] = {**replay, **({"size": capacity} if capacity else {})}
    elif capacity:
        storage["capacity"] = capacity
    result += messages + more + _read_timeout(file, own)
    if len(storage) > 1 or storage["type"] != "memory":
        result += settings({"buffer": storage})
    rest = own.model_copy(update={"replay_buffer": None})
    for name in ("storage_type", "path", "capacity", "max_read_timeout"):
        rest.model_fields_set.discard(name)
    return result + note_unused(rest, f"{BUFFER}.", "it applies to demonstrations; this run samples its rollouts.")


@translates(
    ExperienceBuffer,
    path="demonstrations.data; buffer.path or buffer.url for rollouts",
    storage_type="demonstrations.data.type; buffer.type for rollouts: queue is memory, or file with two processes",
)
def _storage(file: TrinityFile, own: ExperienceBuffer) -> tuple[dict[str, Any], Translation]:
    folder = Path(file.checkpoint_root_dir) / file.project / file.group / file.name
    if own.storage_type == "sql":
        run = {"run": own.name} if own.name else {}
        return {"type": "sql", "url": database_url(own.path or f"sqlite:///{folder}/buffer.db"), **run}, NOTHING
    if own.storage_type == "queue":
        text = f"{BUFFER}.path: Trinity copies its queue there; here rollouts are in {folder} anyway."
        kind = "file" if file.mode in TWO_PROCESSES else "memory"
        return {"type": kind}, note(text) if own.path else NOTHING
    if not own.path:
        return {"type": "file"}, NOTHING
    path = str(Path(own.path).with_suffix(""))
    return {"type": "file", "path": path}, note(f"{BUFFER}.path: batches are files in the folder {path}.")


@translates(
    ReplayBuffer,
    enable="buffer.replay.enable",
    priority_fn="buffer.replay.priority: linear_decay, or linear_decay_limited (decay_limit_randomization)",
    reuse_cooldown_time="buffer.replay.cooldown; null uses each batch once",
    priority_fn_args="buffer.replay: decay, limit (use_count_limit), sigma; merged over the defaults",
)
def _replay(replay: ReplayBuffer) -> tuple[dict[str, Any], Translation]:
    key = f"{BUFFER}.replay_buffer"
    if not replay.enable:
        unused = note_unused(replay, f"{key}.", "it has an effect only with enable: true.")
        return {}, unused if replay.model_fields_set - {"enable"} else NOTHING
    component = PRIORITIES.get(replay.priority_fn)
    if component is None:
        problem = f"there is no '{replay.priority_fn}'."
        return {}, fault(f"{key}.priority_fn", problem, did_you_mean(replay.priority_fn, PRIORITIES))
    priority, _, messages = merge_arguments(component, replay.priority_fn_args, f"{key}.priority_fn_args")
    priority["priority"] = priority.pop("type")
    return {"enable": True, "cooldown": replay.reuse_cooldown_time, **priority}, messages


@translates(ExperienceBuffer, capacity="buffer.capacity; buffer.replay.size where batches are used again")
def _capacity(file: TrinityFile, own: ExperienceBuffer, *, replays: bool) -> tuple[int, Translation]:
    """The capacity in batches, or 0 where it has no effect."""
    if own.capacity < 1:
        return 0, fault(f"{BUFFER}.capacity", f"{own.capacity} batches are too few.", "Set 1 or more.")
    if "capacity" not in own.model_fields_set:
        return 0, NOTHING
    if not replays and file.synchronizer.sync_style == "fixed":
        why = "with sync_style fixed, interval and offset bound how far sampling runs ahead."
        return 0, note(f"{BUFFER}.capacity: {why}")
    return own.capacity, NOTHING


def _read_timeout(file: TrinityFile, own: ExperienceBuffer) -> Translation:
    """Faults and notes about max_read_timeout; `model.synchronization` translates it."""
    key = f"{BUFFER}.max_read_timeout"
    if own.max_read_timeout <= 0:
        return fault(key, f"{own.max_read_timeout:g} seconds is not a timeout.", "Set more than 0.")
    if "max_read_timeout" in own.model_fields_set and file.mode != "train":
        return note(f"{key}: it has an effect in mode train, which waits for another process.")
    return NOTHING


def operators(file: TrinityFile) -> Translation:
    """`filters`, in the file's order."""
    if file.algorithm.algorithm_type in SUPERVISED:
        why = f"{file.algorithm.algorithm_type} trains on demonstrations, so there are no rollouts to filter."
        return note_unused(file.data_processor, "data_processor.", why)
    filters, result = list[dict[str, Any]](), NOTHING
    for index, operator in enumerate(file.data_processor.experience_pipeline.operators):
        rollout_filter, messages = _filter(operator, f"{OPERATORS}[{index}]")
        result += messages
        filters += [rollout_filter] if rollout_filter else []
    return result + (settings({"filters": filters}) if filters else NOTHING)


@translates(Operator, name="filters; operators that are not filters are refused by name", args="filters")
def _filter(operator: Operator, key: str) -> tuple[dict[str, Any], Translation]:
    name, arguments = operator.name, dict(operator.args)
    if name == "pass_rate_calculator":
        return {}, note(f"{key}: the task order always has access to the rewards.")
    if name in UNSUPPORTED_OPERATORS:
        return {}, fault(f"{key}.name", f"'{name}' is not supported.", UNSUPPORTED_OPERATORS[name])
    if name not in THRESHOLD_FILTERS and name not in PLAIN_FILTERS:
        fix = did_you_mean(name, [*THRESHOLD_FILTERS, *PLAIN_FILTERS])
        return {}, fault(f"{key}.name", f"there is no operator '{name}'.", fix)
    rollout_filter: dict[str, Any] = {"type": PLAIN_FILTERS.get(name)}
    if name in THRESHOLD_FILTERS:
        kind, threshold = THRESHOLD_FILTERS[name]
        rollout_filter = {"type": kind, threshold: arguments.pop("threshold", 0.0)}
    result = NOTHING
    if name == "dapo_dynamic_sampling":
        result += note(f"{key}: groups are compared by their total reward, not by accuracy alone.")
    return rollout_filter, result + combine(
        fault(f"{key}.args.{unknown}", "there is no such argument.", "Leave it out.") for unknown in arguments
    )
