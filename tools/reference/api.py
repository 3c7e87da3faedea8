"""The public Python API: what `import tinsmith` gives, with signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from pydantic import BaseModel

import tinsmith


def page() -> str:
    """A section for each public name."""
    return "\n\n".join(_section(name, getattr(tinsmith, name)) for name in sorted(tinsmith.__all__, key=str.lower))


def _section(name: str, thing: Any) -> str:
    about = _prose(thing)
    parts = [f"### {name}", _signature(name, thing), about]
    if inspect.isclass(thing):
        parts += [_fields(thing), _methods(thing)]
    return "\n\n".join(part for part in parts if part)


def _signature(name: str, thing: Any) -> str:
    if inspect.isclass(thing) and (dataclasses.is_dataclass(thing) or issubclass(thing, BaseModel)):
        return ""
    prefix = "class " if inspect.isclass(thing) else "async def " if inspect.iscoroutinefunction(thing) else "def "
    return f"```python\n{prefix}{name}{_shown(thing)}\n```"


def _shown(thing: Any) -> str:
    return str(inspect.signature(thing)).replace("'", "")


def _prose(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "") if isinstance(thing.__doc__, str) else ""


def _fields(kind: type) -> str:
    if not dataclasses.is_dataclass(kind):
        return ""
    names = [f"`{field.name}: {field.type}`" for field in dataclasses.fields(kind)]
    return "Fields: " + ", ".join(names) + "."


def _methods(kind: type) -> str:
    lines = []
    for name, member in vars(kind).items():
        if name.startswith("_") or (issubclass(kind, BaseModel) and not inspect.isfunction(member)):
            continue
        if isinstance(member, property):
            lines.append(f"- `{name}`: {_first(member)}")
        elif inspect.isfunction(member):
            lines.append(
                f"- `{name}{_shown(member).replace('(self, ', '(').replace('(self)', '()')}`: {_first(member)}"
            )
    return "\n".join(lines)


def _first(member: Any) -> str:
    return " ".join((inspect.getdoc(member) or "").split())
