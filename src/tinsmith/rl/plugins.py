"""Workflows, rewards, advantages and environments of users: a folder of Python files, and objects by their import path.

`plugins: FOLDER` in a run file imports every .py file of the folder before the rest of the file is validated. An object
decorated with `@workflow("name")`, `@reward("name")`, `@advantage("name")` or `@environment("name")` is then a type of
that name; any importable object is `{type: custom, path: "module:attribute", args: {…}}`.
docs/train/environments.md, rewards.md and algorithms.md say what can be decorated.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import PlainSerializer, ValidationError

from tinsmith import imports
from tinsmith.errors import ConfigError
from tinsmith.settings import Settings, did_you_mean, sentences

Kind = Literal["workflow", "reward", "advantage", "environment"]
Names = frozenset[tuple[Kind, str]]
T = TypeVar("T", bound=Callable[..., Any])
S = TypeVar("S", bound=Settings)
_MARK = "__tinsmith_part__"
OWN_KEYS: Mapping[Kind, tuple[str, ...]] = {
    "workflow": ("type", "path", "args", "timeout"),
    "reward": ("type", "path", "args", "weight", "name", "role", "isolated"),
    "advantage": ("type", "path", "args"),
    "environment": ("type", "path", "args", "name", "weight", "sampling", "held_out"),
}
"""Keys of a custom part itself; all others are arguments of its code."""


def workflow(name: str) -> Callable[[T], T]:
    """Decorator: register an async function or a settings class as the workflow `name`."""
    return _mark("workflow", name)


def reward(name: str) -> Callable[[T], T]:
    """Decorator: register a function, a class or a settings class as the reward `name`."""
    return _mark("reward", name)


def advantage(name: str) -> Callable[[T], T]:
    """Decorator: register a function from rewards to advantages as the advantage `name`."""
    return _mark("advantage", name)


def environment(name: str) -> Callable[[T], T]:
    """Decorator: register an EnvironmentOptions class as the environment `name`."""
    return _mark("environment", name)


_SECTIONS: Mapping[str, Kind] = {
    "rewards": "reward",
    "workflow": "workflow",
    "advantage": "advantage",
    "environments": "environment",
}
"""Sections of a run file that take types of each kind."""


def located(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The values of a run file in `folder`, whose `plugins` is beside the file, or else in the working directory."""
    plugins = values.get("plugins")
    if not isinstance(plugins, str) or not plugins:
        return dict(values)
    beside = folder / Path(plugins).expanduser()
    return {**values, "plugins": str(beside)} if beside.is_dir() else dict(values)


def type_names(values: Mapping[str, Any], key: str) -> list[str]:
    """The names that the plugins of a run file register as types of the section at `key`, such as rewards.0."""
    section = [part for part in key.split(".") if not part.isdigit()][-1]
    folder = values.get("plugins")
    if section not in _SECTIONS or not folder:
        return []
    return sorted(name for kind, name in plugin_names(Path(str(folder))) if kind == _SECTIONS[section])


def plugin_names(folder: Path) -> Names:
    """Kinds and names that the files of a folder register. Raises ConfigError if a file cannot be imported."""
    return frozenset(part for part, _ in _parts(folder.expanduser()))


def apply_plugins(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run file with types of its plugin folder replaced by `custom` ones. Raises ConfigError."""
    result = dict(values)
    folder = result.get("plugins")
    if not folder:
        return result
    parts = dict(_parts(Path(str(folder)).expanduser()))
    result = _with_custom_parts(result, parts)
    if isinstance(result.get("eval"), Mapping):
        result["eval"] = _with_custom_parts(result["eval"], parts)
        sources = result["eval"].get("sources", {})
        result["eval"]["sources"] = {name: _with_custom_parts(source, parts) for name, source in sources.items()}
    if isinstance(result.get("stages"), list):
        result["stages"] = [
            _with_custom_parts(stage, parts) if isinstance(stage, Mapping) else stage for stage in result["stages"]
        ]
    return result


def path_text(target: Any) -> str:
    """The import path of a function or class, as run.yaml records it; a path is returned as it is."""
    if isinstance(target, str):
        return target
    target = inspect.unwrap(target)  # an object that a decorator made of a function
    named = target if isinstance(target, type | FunctionType | BuiltinFunctionType) else type(target)
    return f"{named.__module__}:{named.__qualname__}"


def _recorded(value: Any) -> Any:
    """An argument as run.yaml records it: functions, classes and other objects by their import path."""
    if isinstance(value, Mapping):
        return {str(key): _recorded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_recorded(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | None) else path_text(value)


ImportPath = Annotated[Any, PlainSerializer(path_text, when_used="json")]
"""module:attribute or file.py:attribute, or from Python the object itself."""
Arguments = Annotated[dict[str, Any], PlainSerializer(_recorded, when_used="json")]
"""Keyword arguments of user code: from a run file plain values, from Python any objects."""


def import_object(path: Any) -> Any:
    """The object at `module:attribute` or `file.py:attribute`; an object is returned as it is. Raises ValueError."""
    if not isinstance(path, str):
        return path
    module, _, name = path.rpartition(":")
    if not (module and name):
        raise ValueError(f"{path!r} is not an import path; write module:attribute, e.g. my_package.rewards:short")
    try:
        return imports.import_object(path)
    except ImportError as error:
        raise ValueError(f"{path} cannot be imported: {error}") from error


def validated(kind: type[S], path: str, args: Mapping[str, Any]) -> S:
    """Validate `args` as the settings class `kind`. Raises ValueError with each fault."""
    try:
        return kind.model_validate(args)
    except ValidationError as error:
        raise ValueError(f"{path}: {' '.join(sentences(kind, error, args))}".removesuffix(".")) from error


def check_signature(
    function: Callable[..., Any],
    path: str,
    positional: Sequence[str],
    args: Mapping[str, Any],
    other_keys: Sequence[str] = (),
) -> None:
    """Raises ValueError unless the function takes the positional arguments of these names, and `args` by keyword.

    `other_keys` are keys that stand beside the arguments in a run file: suggestions for one that is misspelled.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **args)
    except TypeError as error:
        raise ValueError(_argument_fault(signature, path, positional, args, other_keys, str(error))) from error


def _argument_fault(
    signature: inspect.Signature,
    path: str,
    positional: Sequence[str],
    args: Mapping[str, Any],
    other_keys: Sequence[str],
    otherwise: str,
) -> str:
    """What is wrong with the arguments of a function: the first unknown or missing one, and those that it takes."""
    try:
        first = signature.bind_partial(*positional).arguments
    except TypeError:
        passed = ", ".join(name for name in positional if name != "self")
        return f"{path} does not take what a run passes to it: it must be callable with ({passed})"
    keywords = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if passed_twice := sorted(args.keys() & first.keys() & keywords.keys()):
        return f"{path}: the run itself passes '{passed_twice[0]}'; leave it out"
    names = [name for name in keywords if name not in first]
    takes = f"It takes: {', '.join(names)}" if names else "It takes no arguments"
    if unknown := sorted(args.keys() - keywords.keys()):
        suggestion = did_you_mean(unknown[0], [*names, *other_keys])
        return " ".join(filter(None, (f"{path} has no argument '{unknown[0]}'.", suggestion, takes)))
    missing = [name for name in names if keywords[name].default is inspect.Parameter.empty and name not in args]
    return f"{path} needs the argument '{missing[0]}'. {takes}" if missing else f"{path}: {otherwise}"


async def await_if_needed(value: Any) -> Any:
    """The value, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def _mark(kind: Kind, name: str) -> Callable[[T], T]:
    def mark(thing: T) -> T:
        setattr(thing, _MARK, (kind, name))
        return thing

    return mark


def _parts(folder: Path) -> Iterator[tuple[tuple[Kind, str], str]]:
    """((kind, name), import path) of every object that the files of the folder register."""
    if not folder.is_dir():
        raise ConfigError(
            f"plugins: there is no folder {folder}.",
            "Check the path; in a run file it is relative to the file, or else to the working directory.",
        )
    resolved = str(folder.resolve())
    if resolved not in sys.path:
        sys.path.append(resolved)  # so that the files can import each other
    for file in sorted(folder.glob("*.py")):
        module = _module(file)
        for name, thing in vars(module).items():
            if isinstance(thing, type | FunctionType) and thing.__module__ == module.__name__ and _MARK in vars(thing):
                yield vars(thing)[_MARK], f"{module.__name__}:{name}"


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


def _with_custom_parts(section: Mapping[str, Any], parts: Mapping[tuple[Kind, str], str]) -> dict[str, Any]:
    result = dict(section)
    if isinstance(result.get("workflow"), Mapping):
        result["workflow"] = _custom("workflow", result["workflow"], parts)
    if isinstance(result.get("rewards"), list | tuple):
        result["rewards"] = [
            _custom("reward", entry, parts) if isinstance(entry, Mapping) else entry for entry in result["rewards"]
        ]
    if isinstance(result.get("environments"), list | tuple):
        result["environments"] = [
            _custom("environment", _with_custom_parts(entry, parts), parts) if isinstance(entry, Mapping) else entry
            for entry in result["environments"]
        ]
    if isinstance(result.get("algorithm"), Mapping):
        result["algorithm"] = _with_custom_advantages(result["algorithm"], parts)
    return result


def _with_custom_advantages(section: Mapping[str, Any], parts: Mapping[tuple[Kind, str], str]) -> dict[str, Any]:
    result = dict(section)
    if isinstance(result.get("advantage"), Mapping):
        result["advantage"] = _custom("advantage", result["advantage"], parts)
    if isinstance(result.get("roles"), Mapping):
        result["roles"] = {
            name: _with_custom_advantages(role, parts) if isinstance(role, Mapping) else role
            for name, role in result["roles"].items()
        }
    return result


def _custom(kind: Kind, part: Mapping[str, Any], parts: Mapping[tuple[Kind, str], str]) -> dict[str, Any]:
    path = parts.get((kind, str(part.get("type"))))
    if path is None:
        return dict(part)
    own = {key: value for key, value in part.items() if key in OWN_KEYS[kind]}
    args = {key: value for key, value in part.items() if key not in own}
    if kind in ("reward", "environment"):
        own.setdefault("name", part["type"])
    return {**own, "type": "custom", "path": path, "args": {**args, **dict(own.get("args", {}))}}
