"""The files of `plugins` of a run file: what they register, and the run file with it.

`plugins: FOLDER` or `plugins: FILE.py` imports the files before the rest of the run file is validated. A decorated
object (`plugins`) is then a type of its name in the sections of its kind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from pydantic import BaseModel

from tinsmith import imports
from tinsmith.errors import ConfigError
from tinsmith.rl.plugins import KINDS, MARK, CustomPart, Kind, Names, import_object, kind_at, path_text, place_of

_Registered = Mapping[tuple[Kind, str], str]
"""Import paths by kind and name."""


def located(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The values of a run file in `folder`, whose `plugins` is beside the file, or else in the working directory."""
    plugins = values.get("plugins")
    if not isinstance(plugins, str) or not plugins:
        return dict(values)
    beside = folder / Path(plugins).expanduser()
    return {**values, "plugins": str(beside)} if beside.exists() else dict(values)


def type_names(values: Mapping[str, Any], key: str) -> list[str]:
    """The names that the plugins of a run file register as types of the section at `key`, such as rewards.0."""
    kind, folder = _kind_at_key(key), values.get("plugins")
    if kind is None or not folder:
        return []
    return sorted(name for registered, name in plugin_names(Path(str(folder))) if registered == kind)


def origin_of_types(values: Mapping[str, Any], key: str) -> str:
    """How types of one's own come to the section at `key`; empty where a section takes none, or plugins are set."""
    if _kind_at_key(key) is None or values.get("plugins"):
        return ""
    return "To use a type of your own, name its file or folder: plugins: FILE.py."


def _kind_at_key(key: str) -> Kind | None:
    return kind_at([part for part in key.split(".") if not part.isdigit()])


def plugin_names(folder: Path) -> Names:
    """Kinds and names that a file, or the files of a folder, register. Raises ConfigError if one cannot be imported."""
    return frozenset(_registered(folder.expanduser()))


def apply_plugins(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run file with types of its plugins, and objects of user code, as `custom` parts. Raises
    ConfigError."""
    folder = values.get("plugins")
    registered = _registered(Path(str(folder)).expanduser()) if folder else {}
    return {key: _applied(value, (str(key),), registered) for key, value in values.items()}


def custom_parts(settings: BaseModel, key: str = "") -> Iterator[tuple[str, CustomPart]]:
    """The parts of user code in settings, with their keys."""
    if isinstance(settings, CustomPart):
        yield key, settings
    for name, value in settings:
        yield from _parts_in(value, f"{key}.{name}".removeprefix("."))


def described_parts(settings: BaseModel) -> list[str]:
    """A line for each part of user code in settings: its kind, its key, and where its code is."""
    return [
        f"{part.kind} at {key}: {path_text(part.path)}, {place_of(import_object(part.path)) or 'without source'}"
        for key, part in custom_parts(settings)
    ]


def _parts_in(value: Any, key: str) -> Iterator[tuple[str, CustomPart]]:
    if isinstance(value, BaseModel):
        yield from custom_parts(value, key)
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _parts_in(entry, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from _parts_in(entry, f"{key}.{number}")


def _applied(value: Any, path: tuple[str, ...], registered: _Registered) -> Any:
    """A value of a run file at a key, with `custom` parts in it."""
    if isinstance(value, list | tuple):
        return [_applied(entry, path, registered) for entry in value]
    kind = kind_at(path)
    if kind is not None and not isinstance(value, Mapping):
        plain = value is None or isinstance(value, str | int | float | BaseModel)
        return value if plain else {"type": "custom", "path": value}
    if not isinstance(value, Mapping):
        return value
    if kind is not None and "type" in value:
        value = _custom(kind, value, registered)
        if not KINDS[kind].contains:
            return value
    return {
        key: entry if key == "args" else _applied(entry, (*path, str(key)), registered) for key, entry in value.items()
    }


def _custom(kind: Kind, part: Mapping[str, Any], registered: _Registered) -> dict[str, Any]:
    path = registered.get((kind, str(part.get("type"))))
    if path is None:
        return dict(part)
    own = {key: value for key, value in part.items() if key in KINDS[kind].own_keys}
    args = {key: value for key, value in part.items() if key not in own}
    if KINDS[kind].named:
        own.setdefault("name", part["type"])
    return {**own, "type": "custom", "path": path, "args": {**args, **dict(own.get("args", {}))}}


def _registered(place: Path) -> dict[tuple[Kind, str], str]:
    """Import paths of every object that a file, or the files of a folder, register, by kind and name."""
    if place.is_file() and place.suffix == ".py":
        folder, files = place.parent, [place]
    elif place.is_dir():
        folder, files = place, sorted(place.glob("*.py"))
    else:
        raise ConfigError(
            f"plugins: there is no folder {place}, and no Python file of this name.",
            "Check the path; in a run file it is relative to the file, or else to the working directory.",
        )
    resolved = str(folder.resolve())
    if resolved not in sys.path:
        sys.path.append(resolved)  # so that the files can import each other
    paths: dict[tuple[Kind, str], str] = {}
    for file in files:
        for key, path in _parts_of(_module(file)):
            if key in paths:
                kind, name = key
                raise ConfigError(
                    f"plugins: {paths[key]} and {path} are both the {kind} '{name}'.", "Give each a name of its own."
                )
            paths[key] = path
    return paths


def _parts_of(module: ModuleType) -> Iterator[tuple[tuple[Kind, str], str]]:
    """((kind, name), import path) of every object that a module registers."""
    paths: dict[int, str] = {}
    for name, thing in vars(module).items():
        own = isinstance(thing, type | FunctionType) and thing.__module__ == module.__name__ and MARK in vars(thing)
        if own and id(thing) not in paths:  # an object may have two names
            paths[id(thing)] = f"{module.__name__}:{name}"
            yield vars(thing)[MARK], paths[id(thing)]


def _module(file: Path) -> ModuleType:
    """Import a plugin. Raises ConfigError."""
    try:
        return imports.import_file(file)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"plugins: {file} imports {error.name}, which is not installed.",
            "Install it, or write the file without it: docs/train/environments.md.",
        ) from error
    except ImportError as error:
        raise ConfigError(f"plugins: {file} cannot be imported: {error}") from error
    except Exception as error:
        raise ConfigError(f"plugins: {file} cannot be imported: {type(error).__name__}: {error}") from error
