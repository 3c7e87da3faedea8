"""The help text of every command, as `--help` prints it."""

from __future__ import annotations

import io

from cyclopts import App
from rich.console import Console

from tinsmith.cli import app

WIDTH = 100


def page() -> str:
    """A section for each command and subcommand."""
    return "\n\n".join(
        f"### tinsmith {' '.join(words)}\n\n```text\n{_help(words)}\n```" for words in _commands(app, ())
    )


def _commands(group: App, prefix: tuple[str, ...]) -> list[tuple[str, ...]]:
    commands = []
    for name in sorted(name for name in group if not name.startswith("-")):
        command = group[name]
        words = (*prefix, name)
        below = _commands(command, words)
        if command.default_command is not None or not below:
            commands.append(words)
        commands += below
    return commands


def _help(words: tuple[str, ...]) -> str:
    out = io.StringIO()
    app.help_print(list(words), console=Console(file=out, width=WIDTH, color_system=None, force_terminal=False))
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())
