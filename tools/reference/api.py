"""The public Python API: what `import tinsmith` gives, with signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from typing import Any

import tinsmith
from tinsmith.settings import Settings

_QUOTED = re.compile(r"(: |-> )'([^']*)'")
_SETTINGS_PAGES = {
    "RunConfig": "Its keys are in [Run file](run-file.md).",
    "ServeConfig": "Its settings are in [Settings of the service](serve.md).",
}


def page() -> str:
    """A section for each public name."""
    return "\n\n".join(_section(name, getattr(tinsmith, name)) for name in sorted(tinsmith.__all__, key=str.lower))


def _section(name: str, thing: Any) -> str:
    parts = [f"### {name}", _signature(name, thing), _prose(thing), _SETTINGS_PAGES.get(name, "")]
    if inspect.isclass(thing) and name not in _SETTINGS_PAGES:
        parts += [_fields(thing), _methods(thing)]
    return "\n\n".join(part for part in parts if part)


def _signature(name: str, thing: Any) -> str:
    if inspect.isclass(thing):
        plain = dataclasses.is_dataclass(thing) or issubclass(thing, Settings)
        return "" if plain else f"```python\nclass {name}{_shown(thing).removesuffix(' -> None')}\n```"
    word = "async def" if inspect.iscoroutinefunction(thing) else "def"
    return f"```python\n{word} {name}{_shown(thing)}\n```"


def _shown(thing: Any) -> str:
    """The signature, with annotations that are strings shown without quotes."""
    return _QUOTED.sub(r"\1\2", str(inspect.signature(thing)))


def _prose(thing: Any) -> str:
    """The docstring; lines that begin with `Example: ` become code."""
    text = inspect.cleandoc(thing.__doc__ or "")
    return re.sub(r"^Example: (.*)$", r"Example: `\1`", text, flags=re.MULTILINE)


def _fields(kind: type) -> str:
    """A table of the fields of a dataclass, with the docstrings that follow them in the source."""
    if not dataclasses.is_dataclass(kind):
        return ""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    lines = ["| field | type | meaning |", "| --- | --- | --- |"]
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            name, annotation = ast.unparse(statement.target), ast.unparse(statement.annotation).replace("|", "\\|")
            lines.append(f"| `{name}` | `{annotation}` | {_docstring(following)} |")
    return "\n".join(lines)


def _docstring(statement: ast.stmt | None) -> str:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split()).replace("|", "\\|")
    return ""


def _methods(kind: type) -> str:
    lines = []
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            lines.append(f"- `{name}`: {_about(member)}")
        elif inspect.isfunction(member):
            signature = _shown(member).replace("(self, ", "(").replace("(self)", "()")
            lines.append(f"- `{name}{signature}`: {_about(member)}")
    return "\n".join(lines)


def _about(member: Any) -> str:
    return " ".join((inspect.getdoc(member) or "").split())
