"""The table of docs/guides/trinity.md, made from the sections of the dialect.

python -m tests.dialects.trinity.keys_table        writes it into the page
"""

from __future__ import annotations

from pathlib import Path

from tinsmith.dialects.base import Copied, Fate, Honoured, Key, NoMeaning, Refused, keys
from tinsmith.dialects.trinity.schema import TrinityFile

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "trinity.md"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"


def table() -> str:
    """Every key, a heading for each section at the top."""
    sections: dict[str, list[Key]] = {}
    for key in keys(TrinityFile):
        head = key.path.partition(".")[0] if "." in key.path else ""
        sections.setdefault(head, []).append(key)
    return "\n".join(_section(head, found) for head, found in sections.items())


def _section(head: str, found: list[Key]) -> str:
    lines = [f"### `{head}`" if head else "### At the top", "", "| key | default | here |", "| --- | --- | --- |"]
    for key in found:
        path = key.path.removeprefix(f"{head}.")
        lines.append(f"| `{path}` | {_default(key)} | {_fate(key.fate)} |")
    return "\n".join(lines) + "\n"


def _default(key: Key) -> str:
    value = key.default
    if value is None or value in ("", (), {}):
        return ""
    word = str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)
    return f"`{word}`"


def _fate(fate: Fate) -> str:
    match fate:
        case Copied(to):
            text = f"`{to}`"
        case Honoured(by):
            text = by
        case NoMeaning(why):
            text = f"*no meaning:* {why}"
        case Refused(reason, cure):
            text = f"**refused:** {reason} {cure}"
    return text.replace("|", "\\|")


def written(page: str) -> str:
    """`page` with the table of today between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
