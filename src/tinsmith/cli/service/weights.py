"""What `tinsmith chat` and `tinsmith eval` sample from: weights at a server, which is started if it must be."""

from __future__ import annotations

import os
import shlex
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
    from tinsmith.rl.policy.chat import Chat


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingServer:
    """The server that has the weights."""

    url: str | None = None
    """Base URL of the server. Default: that of the run, else TINKER_BASE_URL, else a service is started."""
    key: str | None = None
    """API key of that server. Default: TINKER_API_KEY, else the one in ~/.tinsmith."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointChoice:
    """Which checkpoint of a run."""

    stage: str = ""
    """Stage of a run in stages. Default: the last one that has weights."""
    checkpoint: str = ""
    """Which one of a run: best, last, or a step's number. Default: the best if checkpoint.keep is best, else the
    last."""


_MODEL = ("name", "base_url", "api_key_env", "tokenizer", "chat_template", "chat_template_values")
"""Settings of a run's model that sampling from it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeights:
    """Weights that the command line names, and the settings to reach them with.

    Example: find_weights("runs/addition", [], folder).path
    """

    target: str
    """The word that names them."""
    values: Mapping[str, Any]
    """The sections model and service of a run file, with the settings of the command line, and the folder of the
    service."""
    config: RunConfig
    """Settings with these values."""
    path: str = ""
    """tinker:// path; empty: those of the base model."""
    saved: RunCheckpoint | None = None
    """The checkpoint of a run, if it is one."""

    @property
    def run(self) -> RunHistory | None:
        """The run, or the stage of one, that has the weights."""
        return self.saved.run if self.saved else None


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


def settings_among(
    words: Sequence[str], command: str, sections: Sequence[str] = ("model", "service")
) -> tuple[list[str], list[str]]:
    """The other words, and the settings among them. Raises ConfigError for one of another section than these."""
    overrides = [word for word in words if "=" in word and not word.startswith("tinker://")]
    if unknown := [word for word in overrides if word.partition(".")[0] not in sections]:
        raise ConfigError(
            f"'{unknown[0]}': tinsmith {command} takes settings of {', '.join(sections[:-1])} and {sections[-1]} only.",
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
    choice: CheckpointChoice | None = None,
) -> ServedWeights:
    """The weights that `target` names (`find_weights`) at their server (`open_server`)."""
    weights = find_weights(target, overrides, folder, choice)
    url, key = open_server(stack, weights, console, server)
    of_run = {}
    if weights.saved:
        of_run = {"step": weights.saved.step, "settings": weights.saved.run.settings, "run": weights.saved.run}
    return ServedWeights(url=url, key=key, base=weights.config.model.name, path=weights.path, **of_run)


def find_weights(
    target: str, overrides: Sequence[str], folder: Path, choice: CheckpointChoice | None = None
) -> NamedWeights:
    """The weights that `target` names: a base model, the folder of a run or a tinker:// path.

    The service of a base model has its data in `folder`. Raises ConfigError if there are none.
    """
    from tinsmith.overrides import apply_overrides
    from tinsmith.rl.config import RunConfig
    from tinsmith.settings import build

    saved = _checkpoint_of(target, choice or CheckpointChoice())
    values = apply_overrides(_values(target, saved, folder), overrides, RunConfig)
    # A run file needs tasks; none of these is drawn.
    tasks = {"tasks": {"eval": {"type": "addition"}}, "rewards": [{"type": "number"}]}
    config = build(RunConfig, {**values, **tasks, "mode": "bench", "name": "sampling"}, target, overrides)
    path = saved.sampling_path if saved else target if target.startswith("tinker://") else ""
    return NamedWeights(target=target, values=values, config=config, path=path, saved=saved)


def _checkpoint_of(target: str, choice: CheckpointChoice) -> RunCheckpoint | None:
    """The checkpoint of a run folder; None for another target. Raises ConfigError for a folder of neither kind."""
    from tinsmith.engine.config import check_source
    from tinsmith.rl.history import RunHistory, find_checkpoint

    folder = Path(target)
    _check_folder(target)
    if target.startswith("tinker://") or not folder.is_dir() or (folder / "config.json").exists():
        if choice.stage or choice.checkpoint:
            option = "--stage" if choice.stage else "--checkpoint"
            raise ConfigError(f"{option} selects one of a run, and {target} is none.", "Leave it out.")
        return None
    if (folder / "adapter_config.json").is_file():
        check_source(target)
    try:
        run = RunHistory.open(folder)
    except ConfigError as error:
        raise ConfigError(
            f"{target} is neither the folder of a run nor of a model.", "Name one that has run.yaml or config.json."
        ) from error
    return find_checkpoint(_stage_of(run, choice.stage), choice.checkpoint)


def _check_folder(target: str) -> None:
    """Raise ConfigError for a folder that does not exist: a path such as ./model, or one in a folder of runs. Other
    names may be those of a model at a server or on the hub."""
    from tinsmith.settings import did_you_mean

    folder = Path(target)
    runs = [run.parent.name for run in folder.parent.glob("*/run.yaml")] if folder.parent != Path() else []
    if not folder.exists() and (target.startswith(".") or runs):
        hint = did_you_mean(folder.name, runs) or "Name the folder of a run or of a model, or a model of the hub."
        raise ConfigError(f"There is no folder {target}.", hint)


def _stage_of(run: RunHistory, name: str) -> RunHistory:
    """The stage of a run, or the run itself if none is named. Raises ConfigError."""
    if not name:
        return run
    stages = {each.path.name.partition("-")[2]: each for each in run.stages}
    if name not in stages:
        hint = f"Its stages: {', '.join(stages)}." if stages else "It is a run without stages; leave out --stage."
        raise ConfigError(f"{run.path} has no stage {name}.", hint)
    return stages[name]


def _values(target: str, saved: RunCheckpoint | None, folder: Path) -> dict[str, Any]:
    """The sections model and service, and the folder of the service: those of the run, or of a model by name."""
    from tinsmith.rl.history import data_folder

    if saved is None:
        return {"model": {"name": target}, "folder": str(folder)}
    stored = saved.run.settings
    model = stored.get("model") or {}
    data = data_folder(saved.run)
    return {
        "model": {name: model[name] for name in _MODEL if name in model},
        "service": stored.get("service") or {},
        "folder": str(data.parent if data else saved.run.path),
    }


def open_server(
    stack: ExitStack, weights: NamedWeights, console: Console, server: SamplingServer | None = None
) -> tuple[str, str]:
    """(URL, key) of the server of weights: the one that the command line or the settings name, or else one that is
    started, and stops when the stack closes."""
    from tinsmith import runner
    from tinsmith.rl.history import data_folder
    from tinsmith.settings import changed_keys
    from tinsmith.terminal import waiting

    target, config, saved, server = weights.target, weights.config, weights.saved, server or SamplingServer()
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


def missing_model(name: str) -> str:
    """What to do about a base model that a server does not serve."""
    model = "the model in that folder" if Path(name).is_dir() else "it"
    return (
        f"Serve {model}: tinsmith serve --model {shlex.quote(name)}. Without --url and TINKER_BASE_URL, this command "
        "starts a service with it."
    )


async def open_chat(base: str, path: str, url: str, key: str, **settings: Any) -> tuple[str, Chat]:
    """The name of the base model of weights at a server, and its tokenizer and chat template, with these settings of a
    run's model. Raises UserError if the server does not have them."""
    from tinsmith.rl.policy.models import ModelConfig
    from tinsmith.rl.policy.tinker_models import TinkerModels, base_model_of

    name = await base_model_of(path, url, key) if base.startswith("tinker://") else base
    models = await TinkerModels.connect(ModelConfig(name=name, **settings), url, key, not_found=missing_model(name))
    try:
        return name, models.chat
    finally:
        await models.close()


def _check_at_rest(target: str, saved: RunCheckpoint) -> None:
    """Raise ConfigError for a run in progress with a service of its own, which locks its data folder."""
    if saved.run.status.condition == "running":
        raise ConfigError(
            f"{target} is in progress, and uses its service alone.",
            "Wait for its end. To sample from a run in progress, train it on a server: tinsmith serve.",
        )
