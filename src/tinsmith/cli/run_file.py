"""The commands `tinsmith config show` and `config convert`, and the arguments that name a run file in every command.

Messages go to standard error: standard output is the run file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from tinsmith.errors import ConfigError
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    from rich.console import Console

    from tinsmith.dialects import RunFile
    from tinsmith.rl.config import RunConfig

RUN_FILES = (".yaml", ".yml", ".toml")
"""How names of run files end."""

config = App(name="config", help="Show a run file with all settings, or convert one to Tinsmith's format.")

FileAndOverrides = Annotated[
    str,
    Parameter(
        name="FILE [KEY=VALUE]",
        help="The run file (YAML or TOML, or a file of Trinity-RFT, rLLM or minds_RL), then settings that override it, "
        "such as steps=20 or model.rank=8. For a file of another system, its own keys too (buffer.batch_size=2).",
        allow_leading_hyphen=False,
    ),
]
Config = Annotated[Path | None, Parameter(help="The run file, instead of the first argument.")]
PluginDir = Annotated[
    Path | None,
    Parameter(help="Folder of Python files with your workflows and rewards; overrides the file's plugins."),
]

TimeLimit = Annotated[
    str | None,
    Parameter(
        help="Stop after this time, such as 5h50m, with a checkpoint that the same command continues from, and exit "
        "with 75. Overrides the file's time_limit."
    ),
]


def file_and_overrides(command: str, words: Sequence[str], config: Path | None) -> tuple[Path, Sequence[str]]:
    """The run file, which --config or the first word names, and the overrides."""
    if config is not None:
        return config, words
    if not words:
        raise ConfigError(
            f"tinsmith {command} needs a run file.", f"Example: tinsmith {command} examples/addition.yaml"
        )
    return Path(words[0]), words[1:]


@config.command
def show(*words: FileAndOverrides, config: Config = None, plugin_dir: PluginDir = None) -> None:
    """Print a run file with all its settings, defaults included, in Tinsmith's format."""
    file, overrides = file_and_overrides("config show", words, config)
    run_file = read_with_notes(file, with_plugins(overrides, plugin_dir))
    sys.stdout.write(_yaml(run_file.settings.model_dump(mode="json")))


@config.command
def convert(
    *words: FileAndOverrides, config: Config = None, out: Path | None = None, plugin_dir: PluginDir = None
) -> None:
    """Convert a run file to Tinsmith's format. The converted file describes the same run in the same folder.

    Parameters
    ----------
    out
        File to write; an existing file is an error. Default: standard output.
    """
    file, overrides = file_and_overrides("config convert", words, config)
    run_file = read_with_notes(file, with_plugins(overrides, plugin_dir))
    text = as_run_file(run_file.settings)
    if out is None:
        sys.stdout.write(text)
        return
    if out.exists():
        raise ConfigError(f"{out} already exists.", "Remove it, or name another file.")
    out.write_text(text, encoding="utf-8")


def with_plugins(overrides: Sequence[str], folder: Path | None) -> tuple[str, ...]:
    """The overrides, with `--plugin-dir` as one of them."""
    return (*overrides, f"plugins={folder}") if folder is not None else tuple(overrides)


def with_time_limit(overrides: Sequence[str], time_limit: str | None) -> tuple[str, ...]:
    """The overrides, with `--time-limit` as one of them."""
    return (*overrides, f"time_limit={time_limit}") if time_limit is not None else tuple(overrides)


def print_notes(run_file: RunFile, console: Console) -> None:
    """Print the notes on a run file."""
    from rich.markup import escape

    if run_file.dialect:
        text = f"a file of {run_file.dialect}; differences: {run_file.guide}"
        console.print(f"[dim]{text}[/]", highlight=False)
    for note in run_file.notes:
        console.print(f"[dim]note: {escape(note)}[/]", highlight=False)


def read_with_notes(file: Path, overrides: Sequence[str]) -> RunFile:
    """The run file, after its notes are printed."""
    from tinsmith.dialects import read_run

    run_file = read_run(file, overrides)
    print_notes(run_file, new_console(stderr=True, soft_wrap=True))
    return run_file


def as_run_file(settings: RunConfig) -> str:
    """The text of a run file with the settings that are set."""
    return _yaml(_plain(settings))


def _yaml(values: dict[str, Any]) -> str:
    from tinsmith.settings import to_yaml

    return to_yaml(_escaped(values))


def _plain(settings: RunConfig) -> dict[str, Any]:
    """The settings that are set, as plain values; the others have their defaults when the file is read."""
    from pydantic_core import to_jsonable_python

    from tinsmith.settings import explicit_values

    return to_jsonable_python(explicit_values(settings))


def _escaped(value: Any) -> Any:
    """The value with `${` escaped, so that reading the file does not resolve it as a reference."""
    if isinstance(value, dict):
        return {key: _escaped(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_escaped(entry) for entry in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
