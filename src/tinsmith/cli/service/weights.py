"""What `tinsmith chat` and `tinsmith eval` sample from: weights at a server, which is started if it must be."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Parameter

from tinsmith.cli.machine import Server, server_address
from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.history import RunCheckpoint, RunHistory


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingServer:
    """The server that has the weights."""

    url: str | None = None
    """Base URL of the server. Default: that of the run, else TINKER_BASE_URL, else a service is started."""
    key: str | None = None
    """API key of that server. Default: TINKER_API_KEY, else the one in ~/.tinsmith."""


_MODEL = ("name", "base_url", "api_key_env", "tokenizer", "chat_template", "chat_template_values")
"""Settings of a run's model that sampling from it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """Weights at a server.

    Example: ServedWeights(url="http://127.0.0.1:8000", key="tml-…", base="tiny", path="tinker://RUN/weights/final")
    """

    url: str
    key: str
    base: str
    """Name of the base model; of a checkpoint by its path, that path."""
    path: str = ""
    """tinker:// path; empty: those of the base model."""
    step: int | None = None
    """Step of the checkpoint, if it is one of a run."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run; empty for other weights."""
    run: RunHistory | None = None

    @property
    def name(self) -> str:
        """The name of the weights in the OpenAI API."""
        return self.path or self.base


def settings_among(words: Sequence[str], command: str) -> tuple[list[str], list[str]]:
    """The other words, and the settings among them. Raises ConfigError for one of another part than these commands."""
    overrides = [word for word in words if "=" in word and not word.startswith("tinker://")]
    if unknown := [word for word in overrides if word.partition(".")[0] not in ("model", "service")]:
        raise ConfigError(
            f"'{unknown[0]}': tinsmith {command} takes settings of model and service only.",
            "Its --help lists the options.",
        )
    return [word for word in words if word not in overrides], overrides


def open_weights(
    stack: ExitStack,
    target: str,
    overrides: Sequence[str],
    folder: Path,
    console: Console,
    *,
    server: SamplingServer | None = None,
    checkpoint: str = "",
) -> ServedWeights:
    """The weights that `target` names: a base model, the folder of a run or a tinker:// path.

    `server` is the server that the command line names. Where none is named, one is started, and stops when the stack
    closes; that of a base model has its data in `folder`. `checkpoint`: which one of a run (`find_checkpoint`).
    """
    saved = _checkpoint_of(target, checkpoint)
    config = _config(target, saved, overrides, folder)
    path = saved.sampling_path if saved else target if target.startswith("tinker://") else ""
    url, key = _address(stack, target, config, saved, server or SamplingServer(), console)
    of_run = {"step": saved.step, "settings": saved.run.settings, "run": saved.run} if saved else {}
    return ServedWeights(url=url, key=key, base=config.model.name, path=path, **of_run)


def _checkpoint_of(target: str, which: str) -> RunCheckpoint | None:
    """The checkpoint of a run folder; None for another target. Raises ConfigError for a folder of neither kind."""
    from tinsmith.rl.history import RunHistory, find_checkpoint

    folder = Path(target)
    if target.startswith("tinker://") or not folder.is_dir() or (folder / "config.json").exists():
        if which:
            raise ConfigError(f"--checkpoint selects one of a run, and {target} is none.", "Leave it out.")
        return None
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"{target} holds an adapter, which a server must have first.", "See tinsmith import --help.")
    try:
        run = RunHistory.open(folder)
    except ConfigError as error:
        raise ConfigError(
            f"{target} is neither the folder of a run nor of a model.", "Name one that has run.yaml or config.json."
        ) from error
    return find_checkpoint(run, which)


def _config(target: str, saved: RunCheckpoint | None, overrides: Sequence[str], folder: Path) -> RunConfig:
    """The settings of the model and its service: those of the run, or of a model by name."""
    from tinsmith.overrides import apply_overrides
    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.history import data_folder
    from tinsmith.settings import build

    values: dict[str, Any] = {"model": {"name": target}, "folder": str(folder)}
    if saved is not None:
        stored = saved.run.settings
        model = stored.get("model") or {}
        data = data_folder(saved.run)
        values = {
            "model": {name: model[name] for name in _MODEL if name in model},
            "service": stored.get("service") or {},
            "folder": str(data.parent if data else saved.run.path),
        }
    # A run file needs tasks; none of these is drawn.
    tasks = {"tasks": {"eval": {"type": "addition"}}, "rewards": [{"type": "number"}]}
    values = {**values, **tasks, "mode": "bench", "name": "sampling"}
    return build(RunConfig, apply_overrides(values, overrides, RunConfig), target, overrides)


def _address(
    stack: ExitStack,
    target: str,
    config: RunConfig,
    saved: RunCheckpoint | None,
    server: SamplingServer,
    console: Console,
) -> tuple[str, str]:
    """(URL, key) of the server that the command line or the settings name, or else of one that is started."""
    from tinsmith import runner
    from tinsmith.rl.history import data_folder
    from tinsmith.settings import changed_keys
    from tinsmith.terminal import waiting

    has_own = False
    if saved is not None and not (server.url or config.model.base_url) and data_folder(saved.run):
        _check_at_rest(target, saved)
        has_own = True
    url = "" if has_own else server.url or config.model.base_url or os.environ.get("TINKER_BASE_URL", "")
    if server.url or (server.key and url):
        if saved is None and (unused := changed_keys(config.service)):
            raise ConfigError(f"service.{unused[0]} is not used with a server.", "Leave it out, or --url.")
        return server_address(Server(url=url, key=server.key))
    if server.key:
        raise ConfigError("--key is that of a server, and none is named.", "Name it: --url.")
    if not url and target.startswith("tinker://"):
        raise ConfigError(
            f"{target}: no server is named that has it.",
            "Give --url, or set TINKER_BASE_URL and TINKER_API_KEY; or name the folder of its run.",
        )
    if not url and saved is not None and not has_own:
        raise ConfigError(
            f"The weights of {target} are on the server that it used.",
            "Start that server and give --url, or set TINKER_BASE_URL and TINKER_API_KEY.",
        )
    with waiting(console, f"Opening {target}"):
        return stack.enter_context(runner.own_server(config) if has_own else runner.server(config))


def _check_at_rest(target: str, saved: RunCheckpoint) -> None:
    """Raise ConfigError for a run in progress with a service of its own, which locks its data folder."""
    if saved.run.status.condition == "running":
        raise ConfigError(
            f"{target} is in progress, and uses its service alone.",
            "Wait for its end. To sample from a run in progress, train it on a server: tinsmith serve.",
        )
