"""Run files in any dialect: detected, translated into a RunConfig, with notes on keys that have no effect.

`read_run` is what the commands call. In a foreign file, `key=value` overrides of the file's own keys are applied
before the translation, and overrides of RunConfig's keys after it. Dialects are found by entry points of the group
`tinsmith.dialects`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith import entry_points
from tinsmith.dialects.base import Dialect, has_key
from tinsmith.dialects.unread import refuse_unread
from tinsmith.dialects.wording import in_words_of
from tinsmith.errors import ConfigError
from tinsmith.overrides import COMMAND_LINE, apply_overrides, list_notes, override_key, read_value
from tinsmith.rl import plugin_files
from tinsmith.rl.config import RunConfig
from tinsmith.rl.plugins import Names
from tinsmith.settings import build, nearest_name, parse_file, paths, resolve_interpolations, without_entries

GROUP = "tinsmith.dialects"
"""Group of entry points: each names a Dialect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run file as read.

    Example: RunFile(settings=settings, dialect="Trinity-RFT", notes=("cluster.node_num: …",))
    """

    settings: RunConfig
    dialect: str = ""
    """Empty for Tinsmith's own files."""
    guide: str = ""
    """Page about the differences of the dialect."""
    notes: tuple[str, ...] = ()
    """On keys of the file that have no effect here, or another one than they suggest."""


def dialects() -> tuple[Dialect, ...]:
    """The dialects of all installed packages. Raises ConfigError if one cannot be loaded."""
    return tuple(entry_points.load(GROUP, Dialect).values())


def find_dialect(values: Mapping[str, Any], installed: Sequence[Dialect] | None = None) -> Dialect | None:
    """The dialect of a file with these values, by default among all installed ones; None for Tinsmith's own."""
    return next((dialect for dialect in installed or dialects() if dialect.recognizes(values)), None)


def read_run(file: Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read a run file in any dialect. Raises ConfigError with every fault, its place and its fix."""
    installed = dialects()
    with ExitStack() as stack:
        for dialect in installed:
            stack.enter_context(dialect.plugin_imports())
        values = parse_file(file)
        dialect = find_dialect(values, installed)
        if dialect is None:
            refuse_unread(values, str(file), sorted({each.name for each in installed}, key=str.lower))
            return _read_own(file, values, overrides)
        try:
            return _read_foreign(file, values, overrides, dialect)
        except ConfigError as error:
            begin = f"{file} is read as a file of {dialect.name}, because it has '{_mark(dialect, values)}'."
            raise ConfigError(f"{begin}\n{error.message}", error.hint) from error


def _mark(dialect: Dialect, values: Mapping[str, Any]) -> str:
    """The key of a file by which it is recognized."""
    for key, section in values.items():
        if dialect.recognizes({key: section}):
            below = section if isinstance(section, Mapping) else {}
            deeper = () if dialect.recognizes({key: {}}) else below
            return next(
                (f"{key}.{name}" for name in deeper if dialect.recognizes({key: {name: below[name]}})), str(key)
            )
    return next(iter(values), "")


def _read_own(file: Path, values: Mapping[str, Any], overrides: Sequence[str]) -> RunFile:
    place, values = str(file), plugin_files.located(values, file.parent)
    values = apply_overrides(values, overrides, RunConfig)
    values = resolve_interpolations(values, place, overridden=list(map(override_key, overrides)))
    return RunFile(settings=_named(build(RunConfig, values, place, overrides), file), notes=list_notes(overrides))


def _read_foreign(file: Path, values: Mapping[str, Any], overrides: Sequence[str], dialect: Dialect) -> RunFile:
    place = str(file)
    own = set(map(without_entries, paths(RunConfig))) if overrides else set()
    before: list[str] = []
    after: list[str] = []
    for override in overrides:
        key = dialect.override_key(override)
        exists = without_entries(key) in own
        foreign = _is_foreign(dialect, key) and not _has_own_stages(dialect, override)
        if foreign or (dialect.is_own(override) and not exists):
            before.append(override)
            continue
        if not exists:
            _check_key(dialect, key)
        after.append(f"{key}={_resolved(override.partition('=')[2])}" if "=" in override else override)
    values = dialect.apply(values, before, dialect.schema)
    defaults = dialect.defaults() if "${" in str(values) else None
    translation = dialect.translate(
        resolve_interpolations(values, place, defaults, list(map(dialect.override_key, before))),
        place,
        _plugin_names(after),
        before,
    )
    place = f"{place} (read as {dialect.name})"
    try:
        settings = build(
            RunConfig, dialect.finish(apply_overrides(translation.settings, after, RunConfig)), place, after
        )
    except ConfigError as error:
        raise ConfigError(in_words_of(dialect.schema, values, error.message), error.hint) from error
    notes = (*translation.notes, *list_notes(after))
    return RunFile(settings=_named(settings, file), dialect=dialect.name, guide=dialect.guide, notes=notes)


def _resolved(text: str) -> str:
    """The value of an override of RunConfig's keys, with `${…}` resolved: the keys of the file have other names."""
    return str(resolve_interpolations({"value": text}, COMMAND_LINE)["value"]) if "${" in text else text


def _is_foreign(dialect: Dialect, key: str) -> bool:
    """Whether a key is the dialect's: it names a setting or a section there, or stands in a section that RunConfig does
    not have."""
    head, *rest = key.split(".")
    if head == "stages" and dialect.stage_keys:
        below = ".".join(rest[1:])
        return len(rest) < 2 or (rest[1] in dialect.stage_keys and (len(rest) == 2 or _is_foreign(dialect, below)))
    if head in dialect.schema.model_fields and head not in RunConfig.model_fields:
        return True
    return has_key(dialect.schema, [head, *rest])


def _has_own_stages(dialect: Dialect, override: str) -> bool:
    """Whether an override sets the whole list `stages` to stages of RunConfig: each has a name, which the dialect's
    have not under this key."""
    if not override.startswith("stages=") or "name" in dialect.stage_keys:
        return False
    stages = read_value("stages", override.partition("=")[2])
    if not (isinstance(stages, list) and stages):
        return False
    return all(isinstance(stage, Mapping) and "name" in stage for stage in stages)


def _check_key(dialect: Dialect, key: str) -> None:
    """Raises ConfigError for an unknown key that is nearest to one of the dialect's; RunConfig reports the others."""
    own = {without_entries(path): path for path in paths(RunConfig)}
    foreign = {without_entries(path): path for path in paths(dialect.schema)}
    cutoff = 0.9 if RunConfig.suggestion(key) else 0.75
    nearest = nearest_name(without_entries(key), [*own, *foreign], cutoff=cutoff)
    if nearest and nearest not in own:
        raise ConfigError(f"{COMMAND_LINE}: there is no key '{key}'.", f"Did you mean '{foreign[nearest]}'?")


def _plugin_names(overrides: Sequence[str]) -> Names:
    """The names registered in the plugin folder, which only an override can set for a foreign file."""
    folders = [override.removeprefix("plugins=") for override in overrides if override.startswith("plugins=")]
    return plugin_files.plugin_names(Path(folders[-1])) if folders and folders[-1] else frozenset()


def _named(settings: RunConfig, file: Path) -> RunConfig:
    return settings if settings.name else settings.model_copy(update={"name": file.stem})
