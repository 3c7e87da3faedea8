"""The commands that read a run file and start nothing: `tinsmith check`, `tinsmith config show` and `config convert`.
And how every command is given its run file, those too that start something.

Imports stand inside the commands. What is for people goes to standard error, so that standard output is a run file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tinsmith.dialects import RunFile
    from tinsmith.rl.config import RunConfig

config = App(name="config", help="Run files as they are read: show what one means, or write it in our own form.")

Words = Annotated[
    str,
    Parameter(
        name="FILE [KEY=VALUE]",
        help="The run file (YAML or TOML; or a YAML of Trinity-RFT), then settings laid on top, as steps=20 or "
        "model.rank=8.",
        allow_leading_hyphen=False,
    ),
]
Config = Annotated[Path | None, Parameter(help="The run file, in place of the first word.")]
PluginDir = Annotated[
    Path | None,
    Parameter(help="A folder of Python files with workflows and rewards of your own, in place of the file's plugins."),
]


def parse_words(command: str, words: Sequence[str], config: Path | None) -> tuple[Path, Sequence[str]]:
    """The run file, by --config or as the first word, and what is laid on top."""
    if config is not None:
        return config, words
    if not words:
        raise ConfigError(f"tinsmith {command} needs a run file.", f"As in: tinsmith {command} examples/addition.yaml")
    return Path(words[0]), words[1:]


def check(*words: Words, config: Config = None, plugin_dir: PluginDir = None) -> None:
    """Look at a run file without starting anything: is it in order, and what of it has no meaning here?

    Ends with 0, or with 2 and every fault, each with its cure.
    """
    file, overrides = parse_words("check", words, config)
    found = _read(file, with_plugins(overrides, plugin_dir))
    kind = f", a file of {found.dialect}" if found.dialect else ""
    sys.stdout.write(f"{file}{kind} is in order: {_summary(found.settings)}\n")


@config.command
def show(*words: Words, config: Config = None, plugin_dir: PluginDir = None) -> None:
    """Print the whole run that a file means: every setting, in our own form."""
    file, overrides = parse_words("config show", words, config)
    found = _read(file, with_plugins(overrides, plugin_dir))
    sys.stdout.write(_yaml(found.settings.model_dump(mode="json")))


@config.command
def convert(*words: Words, config: Config = None, out: Path | None = None, plugin_dir: PluginDir = None) -> None:
    """Write a run file in our own form; running it is the same run, and its folder the same.

    Parameters
    ----------
    out
        Where to; standard output if not given. A file that is there already is refused.
    """
    file, overrides = parse_words("config convert", words, config)
    found = _read(file, with_plugins(overrides, plugin_dir))
    text = _yaml(_plain(found.settings))
    if out is None:
        sys.stdout.write(text)
        return
    if out.exists():
        raise ConfigError(f"{out} is there already.", "Remove it, or name another file.")
    out.write_text(text, encoding="utf-8")


def with_plugins(overrides: Sequence[str], folder: Path | None) -> tuple[str, ...]:
    """The words with `--plugin-dir` as one of them."""
    return (*overrides, f"plugins={folder}") if folder is not None else tuple(overrides)


def tell(found: RunFile, console: Console) -> None:
    """What a file says that one may take to mean more than it does, once."""
    from rich.markup import escape

    if found.dialect:
        console.print(f"[dim]a file of {found.dialect}; what differs: docs/guides/trinity.md[/]", highlight=False)
    for note in found.notes:
        console.print(f"[dim]note: {escape(note)}[/]", highlight=False)


def _read(file: Path, overrides: Sequence[str]) -> RunFile:
    from rich.console import Console

    from tinsmith.dialects import read_run

    found = read_run(file, overrides)
    tell(found, Console(stderr=True, soft_wrap=True))
    return found


def _summary(run: RunConfig) -> str:
    """What a run file means, in a line."""
    if run.stages:
        each = [
            f"{stage.name} ({''.join(_work(run.stage_config(number)))})" for number, stage in enumerate(run.stages, 1)
        ]
        return f"{len(each)} stages on {run.model.name}: {', '.join(each)}"
    mode = f"mode {run.mode}, " if run.mode in ("explore", "train") else ""
    what, long = _work(run)
    return f"{mode}{what} on {run.model.name}{long}"


def _work(run: RunConfig) -> tuple[str, str]:
    """What is done, and how long."""
    if run.mode == "bench":
        return "checkpoints compared", ""
    return run.algorithm.type, f", {run.steps} steps" if run.steps else f", {run.epochs:g} epochs"


def _yaml(values: dict[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_literal(values)))


def _plain(settings: RunConfig) -> dict[str, Any]:
    """What is set, as plain values; what is not has its default again when it is read."""
    from pydantic_core import to_jsonable_python

    from tinsmith.settings import explicit_values

    return to_jsonable_python(explicit_values(settings))


def _literal(value: Any) -> Any:
    """With `${` marked as what stands there, which is not to be put in when the file is read."""
    if isinstance(value, dict):
        return {key: _literal(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_literal(one) for one in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
