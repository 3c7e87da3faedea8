"""The commands that only read a run file, `tinsmith check`, `config show` and `config convert`; and the arguments that
name a run file in every command.

Messages go to standard error: standard output is the run file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    from rich.console import Console

    from tinsmith.dialects import RunFile
    from tinsmith.rl.config import RunConfig

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


def check(*words: FileAndOverrides, config: Config = None, plugin_dir: PluginDir = None) -> None:
    """Check a run file without starting anything, and note keys that have no effect.

    Also checks on this machine what the monitors need: packages, API keys, servers that respond; and, for tasks with
    images, whether the model takes them, as its server or its folder says. Exits with 0, or with
    2 after listing every error with its fix.
    """
    file, overrides = file_and_overrides("check", words, config)
    run_file = _read(file, with_plugins(overrides, plugin_dir))
    _check_monitors(run_file.settings)
    _check_images(run_file.settings)
    dialect = f", a file of {run_file.dialect}," if run_file.dialect else ""
    sys.stdout.write(f"{file}{dialect} is valid: {_summary(run_file.settings)}\n")


@config.command
def show(*words: FileAndOverrides, config: Config = None, plugin_dir: PluginDir = None) -> None:
    """Print a run file with all its settings, defaults included, in Tinsmith's format."""
    file, overrides = file_and_overrides("config show", words, config)
    run_file = _read(file, with_plugins(overrides, plugin_dir))
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
    run_file = _read(file, with_plugins(overrides, plugin_dir))
    text = _yaml(_plain(run_file.settings))
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


def _stages(run: RunConfig) -> list[RunConfig]:
    return [run.stage_config(number) for number in range(1, len(run.stages) + 1)] or [run]


def _check_images(run: RunConfig) -> None:
    """Raises ConfigError for tasks with images on a model that takes none."""
    from tinsmith.rl.run_parts import image_field
    from tinsmith.runner import takes_images

    for stage in _stages(run):
        if (field := image_field(stage)) and takes_images(stage) is False:
            raise ConfigError(
                f"The tasks have images in their field {field!r}, and the model {stage.model.name} takes none.",
                "Use a vision-language model (docs/guides/images.md), or remove images from the source.",
            )


def _check_monitors(run: RunConfig) -> None:
    """Print notes on the monitors. Raises ConfigError for one that cannot run on this machine."""

    from tinsmith.rl import monitors
    from tinsmith.rl.run import folder_path

    stages = _stages(run)
    configs = dict.fromkeys(config for stage in stages if stage.mode != "bench" for config in stage.monitors)
    monitors.announce(tuple(configs), folder_path(run), new_console(stderr=True))


def _read(file: Path, overrides: Sequence[str]) -> RunFile:

    from tinsmith.dialects import read_run

    run_file = read_run(file, overrides)
    print_notes(run_file, new_console(stderr=True, soft_wrap=True))
    return run_file


def _summary(run: RunConfig) -> str:
    """A run in one line."""
    if run.stages:
        stages = [
            f"{stage.name} ({''.join(_task_and_length(run.stage_config(number)))})"
            for number, stage in enumerate(run.stages, 1)
        ]
        return f"{counted(len(stages), 'stage')} on {run.model.name}: {', '.join(stages)}"
    mode = f"mode {run.mode}, " if run.mode in ("explore", "train") else ""
    task, length = _task_and_length(run)
    return f"{mode}{task} on {run.model.name}{length}"


def _task_and_length(run: RunConfig) -> tuple[str, str]:
    if run.mode == "bench":
        return "comparison of checkpoints", ""
    environments = f" with {counted(len(run.environments), 'environment')}" if run.environments else ""
    length = counted(run.steps, "step") if run.steps else counted(run.epochs or 0, "epoch")
    return f"{run.algorithm.type}{environments}", f", {length}"


def _yaml(values: dict[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_escaped(values)))


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
