"""Runs from Python: train a run file, or open a run for a training loop of one's own.

A run uses the server that it names (`model.base_url` or TINKER_BASE_URL), or starts a service that ends with the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from tinsmith.dialects import dialects, read_run
from tinsmith.engine_options import DeviceOptions
from tinsmith.errors import ConfigError
from tinsmith.imports import has_torch
from tinsmith.processes import garbage_collection
from tinsmith.rl.config import RunConfig
from tinsmith.rl.diagnosis import Diagnosis, diagnose
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.guards import event_loop
from tinsmith.rl.history import RunHistory, data_folder, find_checkpoint
from tinsmith.rl.policy.server_watch import ServerWatch
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.record.monitors.jsonl import read_metrics
from tinsmith.rl.run import open as opening
from tinsmith.rl.run.parts import Connect, folder_path, with_fresh_folder
from tinsmith.rl.run.run import Run
from tinsmith.rl.run.state import State
from tinsmith.rl.stages import run_stages
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import END_S, embedded
from tinsmith.service.storage.folder_lock import is_locked
from tinsmith.settings import build, changed_keys
from tinsmith.terminal import in_notebook, new_console, waiting

if TYPE_CHECKING:
    from tinsmith.rl.policy.tinker import TinkerTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Where a run ended.

    Example: TrainResult(folder=Path("runs/addition"), step=80, state_path="tinker://…/weights/final", …)
    """

    folder: Path
    """The run folder: metrics, rollouts, report; of a run in stages, the last stage's."""
    step: int
    state_path: str
    """Checkpoint with optimizer state, to continue training from."""
    sampling_path: str
    """Checkpoint to sample from; empty if the run stopped early."""
    stopped_by: str = ""
    """Why the run stopped early, to be continued: `its time limit`, `SIGTERM` or `Ctrl-C`. Empty: it is finished."""
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    """What its metrics say about whether it learned: the number of updates, and findings."""


def train(run: RunConfig | Path | str | None = None, *overrides: str, **settings: Any) -> TrainResult:
    """Train a run to its end, or resume it, as `tinsmith run` does.

    `run` is a file in any supported format, or a RunConfig; `overrides` are settings such as "steps=20". Without a
    `run`, keywords are the keys of a run file. It may be called in a notebook, and wherever else an event loop runs.
    Raises TinsmithError.

    Example: train("addition.yaml", "steps=20").sampling_path
    """
    return train_config(_config(run, overrides, settings), _console())


def train_config(config: RunConfig, console: Console) -> TrainResult:
    """Train a run to its end, or resume it, and say where it ended."""
    stop = stop_signal(config)
    settings, state = run_to_end(config, console, stop)
    folder = folder_path(settings)
    return TrainResult(
        folder=folder,
        step=state.step,
        state_path=state.path,
        sampling_path=state.sampling_path,
        stopped_by=stop.reason if stop.stopped_at else "",
        diagnosis=diagnose(settings.model_dump(mode="json"), read_metrics(folder)),
    )


@asynccontextmanager
async def open_run(run: RunConfig | Path | str | None = None, *overrides: str, **settings: Any) -> AsyncIterator[Run]:
    """A run that is ready for its next step, for a training loop of one's own. Arguments as of `train`; a run in stages
    has no single loop and is refused. At `time_limit`, `run.next_batch` raises StopRequested; `run.stop_after(step)`
    then saves a checkpoint.

    Example: async with open_run("addition.yaml") as run: ...
    """
    config, console = _config(run, overrides, settings), _console()
    if config.stages:
        raise ConfigError("A run in stages cannot be opened as one run.", "Use train, or a file without stages.")
    with ExitStack() as stack:
        watch = ServerWatch(config.model.wait)
        connect = connecting_to(config, stack, console, watch)(config)
        async with opening.open_run(config, connect, console, stop_signal(config)) as opened, watch.watching():
            yield opened


def _config(run: RunConfig | Path | str | None, overrides: tuple[str, ...], settings: Mapping[str, Any]) -> RunConfig:
    if run is None and not settings:
        raise ConfigError(
            "Nothing says what to train.", 'Name a run file, or give its keys: model={"name": …}, tasks=…'
        )
    if run is None:
        run = build(RunConfig, settings, "arguments")
    elif settings:
        raise ConfigError(
            f"Keywords, such as {next(iter(settings))}, are the settings of a run without a file.",
            'Change a file by overrides, such as "steps=20".',
        )
    if isinstance(run, RunConfig):
        if overrides:
            raise ConfigError(
                "Overrides apply to a run file, not to a RunConfig.", "Use RunConfig.model_copy(update=…)."
            )
        config = run if run.name else run.model_copy(update={"name": "run"})
    else:
        config = read_run(Path(run), overrides).settings
    if config.mode in ("explore", "bench"):
        raise ConfigError(f"mode {config.mode} does not train.", "Use tinsmith run.")
    return with_fresh_folder(config)


def stop_signal(config: RunConfig) -> StopSignal:
    """The time limit and grace period of a run that starts now."""
    return StopSignal(config.time_limit, config.grace_period)


def run_to_end(config: RunConfig, console: Console, stop: StopSignal) -> tuple[RunConfig, State]:
    """Run all remaining steps, of all stages. Returns settings and final state of the last stage that trained.

    At `stop`, SIGTERM or Ctrl-C, the run saves a checkpoint to resume from, and `stop.stopped_at` says where.
    """

    async def run() -> tuple[RunConfig, State]:
        watch = ServerWatch(config.model.wait)
        async with watch.watching():
            return await run_stages(config, connecting_to(config, stack, console, watch), console, stop)

    with ExitStack() as stack, stop.at_signals():
        return event_loop.run(run())


def _console() -> Console:
    """A console that stays silent unless it writes to a terminal or a notebook."""
    return new_console(quiet=not (sys.stdout.isatty() or in_notebook()))


def connecting_to(
    settings: RunConfig, stack: ExitStack, console: Console, watch: ServerWatch | None = None
) -> Callable[[RunConfig], Connect]:
    """A function from the settings of a stage to its connection. All stages share one server, which `watch` watches.

    A server that is started for the run stops when the stack closes.
    """
    addresses: list[tuple[str, str]] = []

    def connecting(stage: RunConfig) -> Connect:
        async def connect(state: str, version: int) -> TinkerTrainer:
            with waiting(console, _awaited(settings, stage.model.name, started=bool(addresses))):
                imported = asyncio.create_task(asyncio.to_thread(import_trainer))  # seconds, while the service starts
                if not addresses:
                    addresses.append(await asyncio.to_thread(stack.enter_context, server(settings)))
                base_url, api_key = addresses[0]
                return await (await imported).connect(
                    stage.model, base_url, api_key, seed=stage.seed, state=state, version=version, watch=watch
                )

        return connect

    return connecting


def import_trainer() -> type[TinkerTrainer]:
    """Import what a run needs as soon as its server answers: tokenizers, and the SDK, which imports PyTorch."""
    with garbage_collection.paused():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

        from tinsmith.rl.policy.tinker import TinkerTrainer

        if has_torch():  # configurations of models, which are read with their tokenizers, import it
            import transformers.activations  # noqa: F401
    return TinkerTrainer


def _awaited(settings: RunConfig, model: str, *, started: bool) -> str:
    """What a run, or a stage of it, waits for before its first step. `started`: its own service runs."""
    if started or _address(settings):
        return f"Connecting to {escape(model)}"
    log = own_service(settings).data / "serve.log"
    return f"Starting a service with {escape(model)}, downloaded if necessary; its log is {escape(str(log))}"


def _address(settings: RunConfig) -> str:
    """URL of the server that the run names; empty if it starts one."""
    return settings.model.base_url or os.environ.get("TINKER_BASE_URL", "")


def starts_service(settings: RunConfig) -> bool:
    """Whether the run starts a service of its own."""
    return not _address(settings)


@contextmanager
def server(settings: RunConfig) -> Iterator[tuple[str, str]]:
    """The base URL and API key of the server to use; started here if no URL is set."""
    check_checkpoints(settings)
    base_url = _address(settings)
    if base_url:
        if unused := changed_keys(settings.service):
            keys = f"service.{', service.'.join(unused)}"
            sys.stderr.write(f"note: {keys}: not used, because the run connects to {base_url}\n")
        yield base_url, api_key(base_url, settings.model.api_key_env)
        return
    if settings.shares_a_run:
        raise ConfigError(
            f"mode {settings.mode} is one of two processes and needs a server that both can reach.",
            "Start one with tinsmith serve, and set TINKER_BASE_URL and TINKER_API_KEY for both.",
        )
    with own_server(settings) as address:
        yield address


@contextmanager
def own_server(settings: RunConfig) -> Iterator[tuple[str, str]]:
    """The base URL and API key of the run's own service, which is started here, whatever URL is set."""
    if settings.service.engine == "fake":
        sys.stderr.write("note: service.engine is fake: a dry run without a model; its replies are random tokens\n")
    service = own_service(settings)
    deadline = time.monotonic() + END_S
    while is_locked(service.data) and time.monotonic() < deadline:
        time.sleep(0.1)  # the service of a run that was killed has noticed it, and is ending
    with embedded(service) as (url, key):
        yield url, key


def check_checkpoints(settings: RunConfig) -> None:
    """Raise ConfigError for the folder of a run in place of its checkpoint, and for a checkpoint of another server
    where the run is to start a service, which has none yet."""
    texts = list(_texts_in(settings.model_dump(mode="json", exclude_defaults=True)))
    for key, text in texts:
        if key.rpartition(".")[2] in _OF_MODELS and Layout(Path(text)).settings.is_file():
            raise _run_folder_error(key, Path(text))
    if _address(settings) or own_service(settings).data.exists():
        return
    if settings.resume_from.endswith(".json"):
        folder = Path(settings.resume_from).expanduser().parent.parent
        if data := data_folder(RunHistory(folder)):
            raise ConfigError(
                f"resume_from: {settings.resume_from} is a checkpoint of the service that the run in {folder} started; "
                "this run would start another one.",
                f"Serve it: tinsmith serve --data {data} --model {settings.model.name}; then set TINKER_BASE_URL for "
                f"this run, and TINKER_API_KEY to the key in {data}/api-key.",
            )
    for key, path in ((key, text) for key, text in texts if _CHECKPOINT.fullmatch(text)):
        raise ConfigError(
            f"{key}: {path} is a checkpoint of a server, and this run would start a service of its own without any.",
            "Set TINKER_BASE_URL and TINKER_API_KEY to the server that has it. Of a run that started its own: "
            "tinsmith serve --data FOLDER/service.",
        )


def _run_folder_error(key: str, folder: Path) -> ConfigError:
    """The error for the folder of a run where a model is named, with the path of its checkpoint."""
    run = RunHistory.open(folder)
    saved = find_checkpoint(run)
    path = saved.path if key.endswith("load_from") else saved.sampling_path
    data = data_folder(saved.run)
    serve = f" It is on the service of that run: tinsmith serve --data {data}" if data else ""
    return ConfigError(
        f"{key}: {folder} is the folder of a run, and a model is named by its path.", f"Write {path}.{serve}"
    )


_OF_MODELS = ("model", "reference", "teacher", "load_from")
"""Names of settings that are models of the run's server."""
_CHECKPOINT = re.compile(r"tinker://[^/\s]+/(sampler_)?weights/\S+")


def _texts_in(values: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Keys of settings and the texts there, which may name models of the run's server; arguments of one's own code, and
    sections with a server of their own, may mean others."""
    if isinstance(values, str):
        yield key, values
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from _texts_in(value, f"{key}.{number}")
    elif isinstance(values, dict) and not values.get("base_url"):
        for name, value in values.items():
            if name not in ("args", "data"):
                yield from _texts_in(value, f"{key}.{name}".removeprefix("."))


def takes_images(settings: RunConfig) -> bool | None:
    """Whether the run's model takes images: by its server, or else by the folder of its files; None if neither says it.

    Starts no server.
    """
    base_url = _address(settings)
    if base_url:
        try:
            address = base_url, api_key(base_url, settings.model.api_key_env)
        except ConfigError:
            return None
        from tinsmith.rl.policy.sdk import capabilities  # imports the SDK

        return asyncio.run(capabilities(*address)).images.get(settings.model.name)
    folder = Path(settings.service.source or settings.model.name).expanduser()
    try:
        return "vision_config" in json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None


def own_service(settings: RunConfig) -> ServeConfig:
    """The service that a run starts where no server is named; its data folder is in the run folder."""
    service = settings.service
    device = DeviceOptions.model_fields if service.engine == "torch" else ()
    return ServeConfig(
        models=(f"{settings.model.name}={service.source}" if service.source else settings.model.name,),
        data=Layout(folder_path(settings)).service,
        engine=service.engine,
        custom_losses=True,  # of this run alone
        **{name: service.__dict__[name] for name in device},
    )


def api_key(base_url: str, variable: str = "TINKER_API_KEY") -> str:
    """The API key in the environment variable, or else in one of a dialect, such as TRINITY_API_KEY."""
    names = [variable, *(dialect.api_key_env for dialect in dialects())]
    keys = {name: key for name in names if name and (key := os.environ.get(name))}
    if not keys:
        raise ConfigError(
            f"There is no API key for {base_url}.",
            f"Set {variable}. A Tinsmith server keeps its own in api-key of its data folder.",
        )
    first, *others = keys
    if differing := [name for name in others if keys[name] != keys[first]]:
        sys.stderr.write(f"note: {first} and {differing[0]} differ; {first} is used\n")
    if not keys[first].startswith("tml-"):
        raise ConfigError(
            f"The API key for {base_url} does not begin with tml-, and the SDK sends no other.",
            f"Set {variable} to a key of that server.",
        )
    return keys[first]
