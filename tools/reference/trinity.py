"""The table of Trinity-RFT's keys, from the sections of the dialect."""

from __future__ import annotations

from tinsmith.dialects.base import Copied, Fate, Ignored, Key, Refused, Translated
from tinsmith.dialects.trinity.translate import file_keys


def page() -> str:
    """Every key, with a heading for each section at the top of a file."""
    sections: dict[str, list[Key]] = {}
    for key in file_keys():
        head = key.path.partition(".")[0] if "." in key.path else ""
        sections.setdefault(head, []).append(key)
    return "\n".join(_section(head, entries) for head, entries in sections.items())


def _section(head: str, entries: list[Key]) -> str:
    lines = [f"## `{head}`" if head else "## At the top", "", "| key | default | here |", "| --- | --- | --- |"]
    for key in entries:
        path = key.path.removeprefix(f"{head}.")
        lines.append(f"| `{path}` | {_default(key)} | {_fate(key.fate)} |")
    return "\n".join(lines) + "\n"


def _default(key: Key) -> str:
    value = key.default
    if value is None or value in ("", (), {}):
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)
    return f"`{text}`"


def _fate(fate: Fate) -> str:
    match fate:
        case Copied(to):
            text = f"`{to}`"
        case Translated(becomes):
            text = becomes
        case Ignored(why):
            text = f"*ignored:* {why}"
        case Refused(reason, fix):
            text = f"**refused:** {reason} {fix}"
    return text.replace("|", "\\|")
