"""The tables of keys of other systems, from the sections of the dialects."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic_core import PydanticUndefined

from tinsmith.dialects.base import Copied, Fate, Ignored, Key, Refused, Translated
from tinsmith.integrations.minds.files import translate as minds_files
from tinsmith.integrations.rllm.files import dialect as rllm
from tinsmith.integrations.trinity.files.translate import file_keys
from tinsmith.rl.config.other_names import OTHER_NAMES


def trinity() -> str:
    """Every key of a file of Trinity-RFT."""
    return _page(file_keys(), "##")


def minds() -> str:
    """Every key of a file of minds_RL."""
    return _page(minds_files.file_keys(), "##")


def rllm_tinker() -> str:
    """Every key of rLLM's `tinker_rl_trainer`."""
    return _page(rllm.file_keys(), "###")


def rllm_unified() -> str:
    """Every key of rLLM's `unified` that `tinker_rl_trainer` does not have."""
    return _page(rllm.unified_keys(), "###")


def _page(keys: Iterable[Key], level: str) -> str:
    """Keys with a heading for each section at the top of a file; those of `rllm` for each section in it."""
    sections: dict[str, list[Key]] = {}
    for key in keys:
        parts = key.path.split(".")
        depth = min(2 if parts[0] == "rllm" else 1, len(parts) - 1)
        sections.setdefault(".".join(parts[:depth]), []).append(key)
    return "\n".join(_section(head, entries, level) for head, entries in sections.items())


def _section(head: str, entries: list[Key], level: str) -> str:
    lines = [
        f"{level} `{head}`" if head else f"{level} At the top",
        "",
        "| key | default | here |",
        "| --- | --- | --- |",
    ]
    for key in entries:
        path = key.path.removeprefix(f"{head}.")
        lines.append(f"| `{path}` | {_default(key)} | {_fate(key.fate)} |")
    return "\n".join(lines) + "\n"


def _default(key: Key) -> str:
    value = key.default
    if value is PydanticUndefined:
        return "required"
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


def other_names() -> str:
    """The names of other systems and ours."""
    systems = dict.fromkeys(row.system for row in OTHER_NAMES)
    return "\n\n".join(_names_of(system) for system in systems)


def _names_of(system: str) -> str:
    rows = [
        f"| `{row.name}` | {', '.join(f'`{key}`' for key in row.our_keys) or 'none'} | {row.remark} |"
        for row in OTHER_NAMES
        if row.system == system
    ]
    title = system[0].upper() + system[1:] if system == "other systems" else system
    return "\n".join([f"## {title}", "", "| name | here | remark |", "| --- | --- | --- |", *rows])
