"""Code of one's own in a run: a folder of Python files, named parts in them, and parts by their dotted path.

`plugins: FOLDER` in a run file imports every .py of that folder before anything else of the file is read. What a file
marks with `@workflow("name")` or `@reward("name")` is a type of that name from then on; anything importable is
`{type: custom, path: "module:thing", args: {…}}`. What the marks are put on: docs/guides/workflows-and-rewards.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from tinsmith.errors import ConfigError
from tinsmith.settings import Settings

Kind = Literal["workflow", "reward"]
Names = frozenset[tuple[Kind, str]]
T = TypeVar("T", bound=Callable[..., Any])
S = TypeVar("S", bound=Settings)
_MARK = "__tinsmith_part__"
_OWN = {"workflow": ("type", "path", "args"), "reward": ("type", "path", "args", "weight", "name")}
"""Keys that stay with the part; all others are arguments of the code."""


def workflow(name: str) -> Callable[[T], T]:
    """Marks an async function or a settings class as the workflow `name`."""
    return _mark("workflow", name)


def reward(name: str) -> Callable[[T], T]:
    """Marks a function, a class or a settings class as the reward `name`."""
    return _mark("reward", name)


def plugin_names(folder: Path) -> Names:
    """What the files of a folder mark. Raises ConfigError where one cannot be imported."""
    return frozenset(part for part, _ in _parts(folder.expanduser()))


def apply_plugins(values: Mapping[str, Any]) -> dict[str, Any]:
    """A run file's values with the types of its plugin folder written as `custom` ones. Raises ConfigError."""
    found = dict(values)
    folder = found.get("plugins")
    if not folder:
        return found
    parts = dict(_parts(Path(str(folder)).expanduser()))
    found = _translated(found, parts)
    if isinstance(found.get("eval"), Mapping):
        found["eval"] = _translated(found["eval"], parts)
        sources = found["eval"].get("sources", {})
        found["eval"]["sources"] = {name: _translated(one, parts) for name, one in sources.items()}
    if isinstance(found.get("stages"), list):
        found["stages"] = [_translated(one, parts) if isinstance(one, Mapping) else one for one in found["stages"]]
    return found


def import_object(path: str) -> Any:
    """What `module:attribute` names. Raises ValueError."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{path!r} is no path; write module:attribute, as my_package.rewards:short")
    try:
        thing: Any = importlib.import_module(module)
        for part in name.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path} cannot be imported: {error}") from error
    return thing


def validated(kind: type[S], path: str, args: Mapping[str, Any]) -> S:
    """The settings class `kind` with these arguments. Raises ValueError that names what is wrong."""
    try:
        return kind.model_validate(args)
    except ValidationError as error:
        faults = [f"'{'.'.join(map(str, one['loc']))}': {one['msg']}" for one in error.errors()]
        raise ValueError(f"{path} does not take these settings: {'; '.join(faults)}") from error


def check_signature(thing: Callable[..., Any], path: str, given: int, args: Mapping[str, Any]) -> None:
    """Raises ValueError unless it can be called with `given` things and these arguments."""
    try:
        inspect.signature(thing).bind(*[None] * given, **args)
    except TypeError as error:
        raise ValueError(f"{path} cannot be called with {sorted(args)}: {error}") from error


async def await_if_needed(value: Any) -> Any:
    """The value, awaited if it is to be."""
    return await value if inspect.isawaitable(value) else value


def _mark(kind: Kind, name: str) -> Callable[[T], T]:
    def mark(thing: T) -> T:
        setattr(thing, _MARK, (kind, name))
        return thing

    return mark


def _parts(folder: Path) -> Iterator[tuple[tuple[Kind, str], str]]:
    """((kind, name), path) of everything marked in the folder's files."""
    if not folder.is_dir():
        raise ConfigError(f"plugins: there is no folder {folder}.", "Check the path; it is relative to where you are.")
    where = str(folder.resolve())
    if where not in sys.path:
        sys.path.append(where)  # so that the files may import each other
    for file in sorted(folder.glob("*.py")):
        module = _module(file)
        for name, thing in vars(module).items():
            if isinstance(thing, type | FunctionType) and thing.__module__ == module.__name__ and _MARK in vars(thing):
                yield vars(thing)[_MARK], f"{module.__name__}:{name}"


def _module(file: Path) -> ModuleType:
    """Imported once in a process, under its own name."""
    name = file.stem
    known = sys.modules.get(name)
    if known is not None:
        if known.__file__ is not None and Path(known.__file__).resolve() == file.resolve():
            return known
        raise ConfigError(f"plugins: {file} has the name of another module, {name}.", "Rename the file.")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        del sys.modules[name]
        cure = "Install it."
        if (error.name or "").split(".")[0] == "trinity":
            cure = "Trinity's own classes are not run here; write the same as in docs/guides/workflows-and-rewards.md."
        raise ConfigError(f"plugins: {file} imports {error.name}, which is not installed.", cure) from error
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"plugins: {file} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _translated(section: Mapping[str, Any], parts: Mapping[tuple[Kind, str], str]) -> dict[str, Any]:
    found = dict(section)
    if isinstance(found.get("workflow"), Mapping):
        found["workflow"] = _custom("workflow", found["workflow"], parts)
    if isinstance(found.get("rewards"), list | tuple):
        found["rewards"] = [
            _custom("reward", one, parts) if isinstance(one, Mapping) else one for one in found["rewards"]
        ]
    return found


def _custom(kind: Kind, part: Mapping[str, Any], parts: Mapping[tuple[Kind, str], str]) -> dict[str, Any]:
    path = parts.get((kind, str(part.get("type"))))
    if path is None:
        return dict(part)
    own = {key: value for key, value in part.items() if key in _OWN[kind]}
    args = {key: value for key, value in part.items() if key not in own}
    if kind == "reward":
        own.setdefault("name", part["type"])
    return {**own, "type": "custom", "path": path, "args": {**args, **dict(own.get("args", {}))}}
