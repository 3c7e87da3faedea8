"""Parts of one's own: the kinds of code that a run file or a Python object can name, and how it is found and called.

A decorator such as `@reward("short")` registers a function or class of a file that the run file names in `plugins`
(`plugin_files`); any importable object is `{type: custom, path: "module:attribute", args: {…}}`, and from Python the
object itself. `KINDS` says where each kind stands in a run file. docs/code/extend.md has an example of each.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, PlainSerializer, ValidationError, model_validator

from tinsmith import imports
from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.rl.guards.user_code import describe
from tinsmith.settings import Settings, did_you_mean, sentences

Kind = Literal[
    "workflow", "reward", "advantage", "environment", "loss", "algorithm", "source", "order", "filter", "evaluation",
    "monitor", "callback", "sampling method",
]  # fmt: skip
Names = frozenset[tuple[Kind, str]]
T = TypeVar("T", bound=Callable[..., Any])
S = TypeVar("S", bound=Settings)
MARK = "__tinsmith_part__"
"""Attribute of a decorated object: its kind and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKind:
    """Where parts of a kind stand in a run file.

    Example: PartKind(sections=("algorithm.loss",), keys=())
    """

    sections: tuple[str, ...]
    """Keys of a run file, or their last names; `*` is any name. A list of parts has the key of the list."""
    keys: tuple[str, ...] = ()
    """Keys beside `type`, `path` and `args` that are not arguments of the code."""
    named: bool = False
    """Whether the type is the default of the key `name`."""
    contains: bool = False
    """Whether a part may contain parts of other kinds."""

    @property
    def own_keys(self) -> tuple[str, ...]:
        """Keys of the part itself; all others are arguments of its code."""
        return ("type", "path", "args", *self.keys)


KINDS: Mapping[Kind, PartKind] = {
    "workflow": PartKind(sections=("workflow",), keys=("timeout",)),
    "reward": PartKind(sections=("rewards",), keys=("weight", "name", "role", "isolated"), named=True),
    "advantage": PartKind(sections=("advantage",)),
    "environment": PartKind(
        sections=("environments",), keys=("name", "weight", "sampling", "held_out"), named=True, contains=True
    ),
    "loss": PartKind(sections=("algorithm.loss",)),
    "algorithm": PartKind(
        sections=("algorithm",),
        keys=(
            "advantage",
            "grouping",
            "turn_discount",
            "roles",
            "loss",
            "aggregate",
            "kl",
            "kl_penalty",
            "entropy",
            "reference",
            "teacher",
            "merge_replies",
            "refill",
            "mask_truncated",
            "old_logprobs",
            "correction",
            "critic",
        ),
        contains=True,
    ),
    "source": PartKind(
        sections=(
            "tasks.train",
            "tasks.eval",
            "tasks.eval.*",
            "environments.train",
            "environments.eval",
            "demonstrations.data",
        )
    ),
    "order": PartKind(sections=("order",)),
    "filter": PartKind(sections=("filters",)),
    "evaluation": PartKind(sections=("eval.functions",), keys=("name",), named=True),
    "monitor": PartKind(sections=("monitors",)),
    "callback": PartKind(sections=("callbacks",)),
    "sampling method": PartKind(sections=("sampling.method",)),
}


def kind_at(path: Sequence[str]) -> Kind | None:
    """The kind of the parts at a key of a run file, without numbers of lists; None if none stands there."""
    for kind, part in KINDS.items():
        for section in part.sections:
            names = section.split(".")
            if len(names) <= len(path) and all(
                name in ("*", key) for name, key in zip(names, path[-len(names) :], strict=True)
            ):
                return kind
    return None


def workflow(name: str) -> Callable[[T], T]:
    """Decorator: register an async function or a settings class as the workflow `name`."""
    return _mark("workflow", name)


def reward(name: str) -> Callable[[T], T]:
    """Decorator: register a function, a class or a settings class as the reward `name`."""
    return _mark("reward", name)


def advantage(name: str) -> Callable[[T], T]:
    """Decorator: register a function from the rewards, or the replies, of each group as the advantage `name`."""
    return _mark("advantage", name)


def environment(name: str) -> Callable[[T], T]:
    """Decorator: register an EnvironmentOptions class as the environment `name`."""
    return _mark("environment", name)


def loss(name: str) -> Callable[[T], T]:
    """Decorator: register a function of the tokens of a reply as the policy loss `name`."""
    return _mark("loss", name)


def algorithm(name: str) -> Callable[[T], T]:
    """Decorator: register a function that returns the parts of an algorithm as the algorithm `name`."""
    return _mark("algorithm", name)


def source(name: str) -> Callable[[T], T]:
    """Decorator: register a function that returns tasks as the source `name`."""
    return _mark("source", name)


def order(name: str) -> Callable[[T], T]:
    """Decorator: register a function that orders the tasks of an epoch as the order `name`."""
    return _mark("order", name)


def group_filter(name: str) -> Callable[[T], T]:
    """Decorator: register a function that keeps or drops a group as the filter `name`."""
    return _mark("filter", name)


def evaluation(name: str) -> Callable[[T], T]:
    """Decorator: register a function from the policy to metrics as the evaluation `name`."""
    return _mark("evaluation", name)


def monitor(name: str) -> Callable[[T], T]:
    """Decorator: register a function of (step, metrics), or a class, as the monitor `name`."""
    return _mark("monitor", name)


def callback(name: str) -> Callable[[T], T]:
    """Decorator: register a function of (run, step, metrics), or a class with hooks, as the callback `name`."""
    return _mark("callback", name)


def sampling_method(name: str) -> Callable[[T], T]:
    """Decorator: register an async function around requests for replies as the sampling method `name`."""
    return _mark("sampling method", name)


def _mark(kind: Kind, name: str) -> Callable[[T], T]:
    def mark(thing: T) -> T:
        setattr(thing, MARK, (kind, name))
        return thing

    return mark


def path_text(target: Any) -> str:
    """The import path of a function or class, as run.yaml records it; a path is returned as it is."""
    if isinstance(target, str):
        return target
    target = _unwrapped(target)
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
        text = " ".join(sentences(kind, error, args)).removesuffix(".")
        raise ValueError(f"{path}: {text}" if path else text) from error


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
        fault = _argument_fault(signature, path, positional, args, other_keys, str(error))
        raise ValueError(f"{fault}{_see(function)}") from error


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
    if unknown := sorted(args.keys() - keywords.keys()):
        return _unknown_argument(path, unknown[0], names, other_keys)
    missing = [name for name in names if keywords[name].default is inspect.Parameter.empty and name not in args]
    return f"{path} needs the argument '{missing[0]}'. {_takes(names)}" if missing else f"{path}: {otherwise}"


def _unknown_argument(path: str, name: str, names: Sequence[str], other_keys: Sequence[str]) -> str:
    """The sentences about an argument that code does not have; it has those of `names`."""
    suggestion = did_you_mean(name, [*names, *other_keys])
    return " ".join(filter(None, (f"{path} has no argument '{name}'.", suggestion, _takes(names))))


def _takes(names: Sequence[str]) -> str:
    return f"It takes: {', '.join(names)}" if names else "It takes no arguments"


async def await_if_needed(value: Any) -> Any:
    """The value, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def named_arguments(
    function: Callable[..., Any],
    path: str,
    available: Sequence[str],
    args: Mapping[str, Any],
    other_keys: Sequence[str] = (),
) -> tuple[str, ...]:
    """The parameters of a function that a run passes to it, among those that are `available`, all by keyword.

    Raises ValueError unless the function takes them and `args`, and nothing else.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    taken = tuple(name for name in available if takes_all or name in parameters)
    if twice := sorted(args.keys() & set(available)):
        raise ValueError(f"{path}: the run itself passes '{twice[0]}'; leave it out{_see(function)}")
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in (*taken, *args)
    ]
    if missing:
        raise ValueError(
            f"{path} has the parameter '{missing[0]}', which is neither one that a run passes "
            f"({', '.join(available)}) nor set in the run file{_see(function)}"
        )
    unknown = sorted(args.keys() - parameters.keys()) if not takes_all else []
    if unknown:
        options = [name for name in parameters if name not in taken]
        raise ValueError(f"{_unknown_argument(path, unknown[0], options, other_keys)}{_see(function)}")
    return taken


def place_of(target: Any) -> str:
    """FILE:LINE of a function, a class or the class of an object; empty if it has no source."""
    target = _unwrapped(target)
    if isinstance(target, FunctionType):
        return _place(target.__code__.co_filename, target.__code__.co_firstlineno)
    kind = target if isinstance(target, type) else type(target)
    try:
        return _place(inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)[1])
    except (OSError, TypeError):
        return ""


def _place(file: str, line: int) -> str:
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def _unwrapped(target: Any) -> Any:
    """The function that decorators and partial made an object of."""
    while isinstance(target, functools.partial):
        target = target.func
    return inspect.unwrap(target)


def _see(target: Any) -> str:
    """The end of a sentence about user code: where it is."""
    place = place_of(target)
    return f". See {place}" if place else ""


class CustomPart(Settings):
    """Code of a user, selected by its import path."""

    kind: ClassVar[Kind]
    """The kind of part."""

    path: ImportPath
    """Import path, module:attribute: `my_package.parts:name`, or `parts:name` for parts.py in `plugins`. From Python,
    also the object itself."""
    args: Arguments = Field(default_factory=dict)
    """Keyword arguments of the code, or fields of its settings class."""

    @model_validator(mode="after")
    def _check_code(self) -> Self:
        self.check_code()
        return self

    def check_code(self) -> None:
        """Raise ValueError if the code at the path cannot be this part."""

    @property
    def label(self) -> str:
        """Kind, import path and place of the code, for messages."""
        place = place_of(import_object(self.path))
        return f"{self.kind} {path_text(self.path)}{f' ({place})' if place else ''}"

    def function_of(self, *positional: str, named: Sequence[str] = ()) -> tuple[Callable[..., Any], tuple[str, ...]]:
        """The function at the path, with `args`, and which of the `named` values it takes.

        What it raises is raised as ConfigError that names its file and line. Raises ValueError unless it takes the
        positional arguments of these names.
        """
        target, path, keys = import_object(self.path), path_text(self.path), KINDS[self.kind].own_keys
        if not callable(target):
            raise ValueError(f"{path} is not a function{_see(target)}")
        taken: tuple[str, ...] = ()
        if named:
            taken = named_arguments(target, path, named, self.args, keys)
        else:
            check_signature(target, path, positional, self.args, keys)

        def call(*values: Any, **more: Any) -> Any:
            with self.errors_named():
                return target(*values, **more, **self.args)

        return call, taken

    def settings_of(self, kind: type[S]) -> S | None:
        """The settings object, if the path names a class derived from `kind`; None for other code."""
        target = import_object(self.path)
        if isinstance(target, type) and issubclass(target, kind):
            return validated(target, path_text(self.path), self.args)
        return None

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Raise what user code raises as ConfigError that names the code and the line that failed."""
        try:
            yield
        except TinsmithError:
            raise
        except (Exception, SystemExit) as error:
            text = describe(error).rstrip(".")
            raise ConfigError(f"The {self.label} failed: {text}.", "Correct its code.") from error

    def number(self, value: Any, name: str = "") -> float:
        """A finite number that the code returned. Raises ConfigError for anything else."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, str) or not math.isfinite(number):
            place = f" as {name}" if name else ""
            raise self.fault(f"returned {value!r:.80}{place}", "Return finite numbers.")
        return number

    def fault(self, deed: str, fix: str) -> ConfigError:
        """The error about something wrong that the code returned."""
        return ConfigError(f"The {self.label} {deed}.", fix)
