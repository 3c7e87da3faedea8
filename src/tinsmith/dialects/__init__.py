"""Run files, ours and foreign ones: a file is recognised, becomes a RunConfig, and what it says in vain is told.

`read_run` is what commands call. `key=value` words lie on top of what a foreign file became, so they are always keys
of ours. Each dialect is a package beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.dialects.base import Becoming
from tinsmith.dialects.trinity import translate as trinity
from tinsmith.dialects.trinity.plugin_shim import standing_in
from tinsmith.rl import plugins
from tinsmith.rl.config import RunConfig
from tinsmith.rl.plugins import Names
from tinsmith.settings import build, laid, parsed, resolved


@dataclass(frozen=True, slots=True)
class Dialect:
    """A foreign kind of run file."""

    name: str
    recognises: Callable[[Mapping[str, Any]], bool]
    defaults: Callable[[], Mapping[str, Any]]
    """What references in a file find where it says nothing itself."""
    translate: Callable[[Mapping[str, Any], str, Names], Becoming]


DIALECTS = (Dialect(trinity.NAME, trinity.recognises, trinity.defaults, trinity.translate),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A run file as read.

    Example: Read(settings=settings, dialect="Trinity-RFT", notes=("cluster.node_num: …",))
    """

    settings: RunConfig
    dialect: str = ""
    """Empty: ours."""
    notes: tuple[str, ...] = ()
    """What the file says that has no meaning here, or another one than one may think."""


def recognised(values: Mapping[str, Any]) -> Dialect | None:
    """The dialect that a file's mapping is written in; None: it is ours."""
    return next((dialect for dialect in DIALECTS if dialect.recognises(values)), None)


def read_run(file: Path, overrides: Sequence[str] = ()) -> Read:
    """A run from a file in any dialect. Raises ConfigError with every fault, its place and its cure."""
    with standing_in():
        return _read(file, overrides)


def _read(file: Path, overrides: Sequence[str]) -> Read:
    place, values = str(file), parsed(file)
    if (dialect := recognised(values)) is None:
        settings = build(RunConfig, resolved(laid(values, overrides), place), place, overrides)
        return Read(settings=_named(settings, file))
    beneath = dialect.defaults() if "${" in str(values) else None
    becoming = dialect.translate(resolved(values, place, beneath), place, _plugins(overrides))
    ours = laid(becoming.settings, overrides)
    place = f"{place} (read as {dialect.name})"
    settings = build(RunConfig, ours, place, overrides)
    return Read(settings=_named(settings, file), dialect=dialect.name, notes=tuple(becoming.notes))


def _plugins(overrides: Sequence[str]) -> Names:
    """A foreign file names no folder of plugins: a word of the command line does."""
    folders = [word.removeprefix("plugins=") for word in overrides if word.startswith("plugins=")]
    return plugins.names(Path(folders[-1])) if folders and folders[-1] else frozenset()


def _named(settings: RunConfig, file: Path) -> RunConfig:
    return settings if settings.name else settings.model_copy(update={"name": file.stem})
