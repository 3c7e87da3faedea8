"""Translation of a whole configuration of rLLM.

`tinker_rl_trainer` and its successor `unified` are two dialects with the same functions: each looks up its keys at the
places that the configuration has (`values`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tinsmith.dialects.base import (
    NOTHING,
    Dialect,
    Key,
    Section,
    Translation,
    check_faults,
    combine,
    fault,
    has_key,
    keys,
    note,
    translate_declared,
    translates,
)
from tinsmith.dialects.unread import is_unread
from tinsmith.errors import ConfigError
from tinsmith.integrations.rllm.files import algorithm, rollouts, training
from tinsmith.integrations.rllm.files.overrides import NOW, override_key, parse_override
from tinsmith.integrations.rllm.files.schema import RllmFile
from tinsmith.integrations.rllm.files.schema_unified import UnifiedFile
from tinsmith.integrations.rllm.files.values import Values
from tinsmith.overrides import COMMAND_LINE, plain_copy, set_value
from tinsmith.rl.plugins import Names
from tinsmith.settings import build

CONFIGS: Mapping[str, type[Section]] = {"tinker_rl_trainer": RllmFile, "unified": UnifiedFile}
"""Name of a configuration in Hydra -> its keys."""

_MARKS = {
    "model": {"lora_rank"},
    "algorithm": {"adv_estimator", "grouping_level", "norm_adv_by_std_in_grpo"},
    "data": {"train_batch_size", "max_prompt_length", "max_response_length", "train_files", "val_files"},
    "trainer": {"total_epochs", "project_name", "experiment_name", "test_freq", "save_freq", "default_local_dir"},
    "workflow": {"n_parallel_tasks", "retry_limit"},
}
"""Keys of sections that neither Tinsmith's run files nor those of other systems have."""
_SECTIONS = {"training", "tinker_base_url", "val_sampling", "rollout_engine", "validation"}


def is_unified(values: Mapping[str, Any]) -> bool:
    """Whether these are keys of the unified configuration."""
    return not is_unread(values) and ("rllm" in values or "unified" in _default_names(values))


def recognizes(values: Mapping[str, Any]) -> bool:
    """Whether these are keys of `tinker_rl_trainer`."""
    sections = ((values.get(name), marks) for name, marks in _MARKS.items())
    return not (is_unread(values) or is_unified(values)) and (
        not _SECTIONS.isdisjoint(values)
        or "tinker_rl_trainer" in _default_names(values)
        or any(isinstance(section, Mapping) and not marks.isdisjoint(section) for section, marks in sections)
    )


def _default_names(values: Mapping[str, Any]) -> Collection[str]:
    """The entries of Hydra's defaults list that are names."""
    entries = values.get("defaults")
    return [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else ()


def file_keys() -> Iterator[Key]:
    """Every key of `tinker_rl_trainer`, with its fate."""
    return keys(RllmFile)


def unified_keys() -> Iterator[Key]:
    """Every key of `unified` that `tinker_rl_trainer` does not have, with its fate."""
    seed = {key.path for key in file_keys()}
    return (key for key in keys(UnifiedFile) if key.path not in seed)


def defaults() -> dict[str, Any]:
    """The values of `tinker_rl_trainer`, without Hydra's and Tinsmith's own keys."""
    values = RllmFile().model_dump(mode="json", exclude={"hydra": True, "defaults": True, "workflow": {"path", "args"}})
    sampling = {name: f"${{sampling.{name}}}" for name in ("temperature", "top_p")}
    return {**values, "val_sampling": {**sampling, "max_tokens": "${data.max_response_length}"}}


def unified_defaults() -> dict[str, Any]:
    """The values of `unified`, without keys of older configurations."""
    older = ("algorithm", "trainer", "sampling", "val_sampling", "hydra", "defaults")
    values = UnifiedFile().model_dump(mode="json", exclude={**dict.fromkeys(older, True), "workflow": {"path", "args"}})
    for name in ("val_group_size", "resume_from_tinker_id"):
        del values["training"][name]
    tree, rollout = values["rllm"], values["rllm"]["rollout"]
    for name in ("sandbox_backend", "sandbox_concurrency"):
        del tree[name]
    tree["remote_runtime"].pop("backend_config")
    for part in ("train", "val"):
        named = {name: rollout[part][name] for name in ("temperature", "top_p")}
        rollout[part] = {**named, "max_tokens": "${rllm.data.max_response_length}"}
    rollout |= {"n": training.GROUP, "n_val": 1}
    return values


def apply(values: Mapping[str, Any], overrides: Sequence[str], kind: type[Section]) -> dict[str, Any]:
    """`values` with overrides in Hydra's syntax, and with `${now:…}` replaced.

    A key that `+` adds and rLLM does not have is left out: only a script reads it.
    """
    tree = plain_copy(values)
    for override in (parse_override(text, kind) for text in overrides):
        path = override.key.split(".")
        if override.action == "remove":
            _remove(tree, path)
        elif override.action == "set" or has_key(kind, path):
            set_value(tree, path, override.value, kind)
    return replace_time(tree)


def _remove(tree: Any, path: Sequence[str]) -> None:
    """Raises ConfigError if there is no such key."""
    *parents, last = path
    for parent in parents:
        tree = tree.get(parent) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or last not in tree:
        raise ConfigError(f"{COMMAND_LINE}: there is no key '{'.'.join(path)}' to remove.", "Leave it out.")
    del tree[last]


def is_of_script(override: str) -> bool:
    """Whether an override adds or removes a key, which a script may have beside those of rLLM."""
    return override.startswith(("+", "~"))


def _of_script(kind: type[Section], overrides: Sequence[str]) -> Translation:
    """A note on keys that `+` adds and rLLM does not have."""
    added = [override_key(override) for override in overrides if override.startswith("+")]
    unknown = [key for key in added if not has_key(kind, key.split("."))]
    return note(f"{', '.join(unknown)}: no key of rLLM; only a script of its own reads it.") if unknown else NOTHING


def replace_time(value: Any) -> Any:
    """`value` with `${now:FORMAT}` replaced, and without values that are missing (???)."""
    if isinstance(value, Mapping):
        return {key: replace_time(part) for key, part in value.items() if part != "???"}
    if isinstance(value, list | tuple):
        return [replace_time(part) for part in value]
    return NOW.sub(lambda match: time.strftime(match[1]), value) if isinstance(value, str) else value


def translate(
    values: Mapping[str, Any], place: str, plugins: Names = frozenset(), overrides: Sequence[str] = ()
) -> Translation:
    """The settings and notes of a file; `overrides` are the words that set some of its values.

    Raises ConfigError with every fault.
    """
    kind = UnifiedFile if is_unified(values) else RllmFile
    file = build(kind, values, place, [override_key(override) for override in overrides])
    overridden = [override_key(override) for override in overrides]
    without_agent = rollouts.agents(Values(file, overridden))
    return check_faults(translate_file(file, overridden, plugins) + without_agent + _of_script(kind, overrides), place)


def translate_file(
    file: Section,
    overridden: Collection[str] = (),
    plugins: Names = frozenset(),
    estimators: Mapping[str, Mapping[str, Any]] | None = None,
) -> Translation:
    """Settings, notes and faults. `overridden`: keys that the command line sets; `estimators`: those of a script."""
    values = Values(file, overridden)
    return combine(
        [
            translate_declared(file),
            values.conflicts(),
            _defaults_list(values),
            rollouts.translate(values, plugins),
            training.translate(values),
            algorithm.translate(values, estimators or {}),
        ]
    )


@translates(RllmFile, defaults="rLLM's configurations by name; others are refused")
@translates(UnifiedFile, defaults="rLLM's configurations by name; others are refused")
def _defaults_list(values: Values) -> Translation:
    return defaults_list(values.value("defaults"))


def defaults_list(entries: Sequence[Any]) -> Translation:
    """Faults in Hydra's defaults list. `_self_` and names of rLLM's configurations have no effect: built in."""
    result = NOTHING
    for entry in entries:
        (name, choice), *_ = entry.items() if isinstance(entry, Mapping) else [(entry, None)]
        name = str(name).removeprefix("override ").strip().removeprefix("/")
        if name == "rllm/backend":
            if choice != "tinker":
                result += fault("defaults", f"{name}: '{choice}' is not supported.", "Set rllm/backend: tinker.")
        elif choice is not None or name not in (*CONFIGS, "_self_", "rllm/base"):
            result += fault("defaults", f"'{name}' is not read.", "Write its keys into this file.")
    return result


def finish(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run without `eval` if there are no held-out tasks. rLLM splits none off the training tasks."""
    tasks = values.get("tasks")
    if isinstance(tasks, Mapping) and (tasks.get("eval") or tasks.get("held_out")):
        return dict(values)
    without = {key: value for key, value in values.items() if key != "eval"}
    return {**without, "tasks": {**tasks, "held_out": 0}} if isinstance(tasks, Mapping) else without


TINKER_TRAINER = Dialect(
    name="rLLM",
    guide="docs/from/rllm.md",
    schema=RllmFile,
    recognizes=recognizes,
    translate=translate,
    defaults=defaults,
    override_key=override_key,
    apply=apply,
    is_own=is_of_script,
    finish=finish,
)
UNIFIED = replace(TINKER_TRAINER, schema=UnifiedFile, recognizes=is_unified, defaults=unified_defaults)
