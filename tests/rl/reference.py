"""The reference tables of docs/reference/run-file.md, made from the settings classes.

python -m tests.rl.reference        writes them into the page
"""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

from pydantic_core import PydanticUndefined

from tinsmith.rl.config import RunConfig
from tinsmith.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "run-file.md"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"


def members(annotation: typing.Any) -> list[type[Settings]]:
    """The settings classes in a field's type."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation] if issubclass(annotation, Settings) else []
    return list(dict.fromkeys(one for part in typing.get_args(annotation) for one in members(part)))


def tagged(kind: type[Settings]) -> bool:
    """Whether its type is what tells it from others in its place."""
    tag = kind.model_fields.get("type")
    return tag is not None and len(typing.get_args(tag.annotation)) == 1


def tables() -> str:
    """A table for the top and for every part, in the order of RunConfig."""
    parts = [_table("At the top", "", RunConfig)]
    for path, kinds in _parts(RunConfig, ""):
        for kind in kinds:
            tag = kind.model_fields["type"].default if tagged(kind) else ""
            parts.append(_table(f"`{path}`" + (f" of type `{tag}`" if tag else ""), inspect.getdoc(kind) or "", kind))
    return "\n".join(parts)


def _parts(kind: type[Settings], prefix: str) -> list[tuple[str, list[type[Settings]]]]:
    found = []
    for name, field in kind.model_fields.items():
        if kinds := members(field.annotation):
            path = f"{prefix}{name}"
            if path in ("tasks.eval", "eval.rewards"):  # the same as tasks.train and rewards
                continue
            found.append((path, kinds))
            for one in kinds:
                found += _parts(one, f"{path}.")
    return found


def _table(title: str, about: str, kind: type[Settings]) -> str:
    lines = [f"### {title}", "", about.strip()]
    fields = {name: field for name, field in kind.model_fields.items() if name != "type" or not tagged(kind)}
    lines += ["", "| key | default | meaning |", "| --- | --- | --- |"] if fields else []
    for name, field in fields.items():
        kinds = members(field.annotation)
        help_text = " ".join((field.description or (kinds[0].__doc__ or "" if kinds else "")).split())
        if typing.get_origin(field.annotation) is typing.Literal:
            help_text += f" One of {', '.join(f'`{one}`' for one in typing.get_args(field.annotation))}."
        lines.append(f"| `{name}` | {_default(field, kinds)} | {help_text.replace('|', chr(92) + '|')} |")
    return "\n".join(line for line in lines if line is not None).replace("\n\n\n", "\n\n") + "\n"


def _default(field: typing.Any, kinds: list[type[Settings]]) -> str:
    if field.is_required():
        return "required"
    if kinds:
        return ""
    default = field.default_factory() if field.default is PydanticUndefined else field.default
    if default is None or default == "":
        return ""
    return f"`{default}`".replace("True", "true").replace("False", "false")


def written(page: str) -> str:
    """`page` with the tables of today between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + tables() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
