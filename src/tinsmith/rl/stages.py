"""Runs in stages: each stage is a run of its own that starts from the weights of the previous one.

Each stage has a run folder in that of the run. An interrupted run resumes in the stage that was running; finished
stages are not repeated. A stage of mode bench compares the checkpoints of the previous training stage. A run without
stages is an ordinary run in its own folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from tinsmith.atomic import atomic_write
from tinsmith.errors import ConfigError
from tinsmith.rl.bench import bench
from tinsmith.rl.config import RunConfig
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.policy.models import Models
from tinsmith.rl.policy.trainer import Trainer
from tinsmith.rl.record import monitors
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.run.folder import RunFolder
from tinsmith.rl.run.loop import train
from tinsmith.rl.run.parts import Connect, folder_path
from tinsmith.rl.run.state import State


async def run_stages(
    config: RunConfig, connecting: Callable[[RunConfig], Connect], console: Console, stop: StopSignal | None = None
) -> tuple[RunConfig, State]:
    """Run all remaining stages. Returns settings and final state of the last stage that trained.

    `connecting` returns the Connect function for the settings of a stage; all stages use one server. `stop` may end the
    run early, in any stage.
    """
    stop = stop or StopSignal()
    path = folder_path(config)
    if not config.stages:
        if Layout(path).stages.exists():
            raise ConfigError(f"{path} holds a run in stages.", "Set another folder, e.g. folder=runs/another.")
        return config, await train(config, connecting(config), console, stop)
    folder = RunFolder.open(path, config.model_dump(mode="json"), resume=config.resume is True)
    try:
        if folder.state is not None:
            raise ConfigError(f"{path} holds a run without stages.", "Set another folder, e.g. folder=runs/another.")
        return await _run_each(config, path, connecting, console, stop)
    finally:
        folder.close()


async def _run_each(
    config: RunConfig, path: Path, connecting: Callable[[RunConfig], Connect], console: Console, stop: StopSignal
) -> tuple[RunConfig, State]:
    for stage_config in config.runs:
        if stage_config.mode != "bench":
            monitors.preflight(stage_config.monitors, path)  # those of later stages too, before the first one trains
    names = [stage.name for stage in config.stages]
    final_states = _final_states(path, names)
    trained: tuple[RunConfig, State] | None = None
    for number, stage in enumerate(config.stages, 1):
        previous = trained[1].result_path if trained else ""
        stage_config = config.stage_config(number, previous)
        if stage_config.mode == "bench" and final_states.get(stage.name) == previous:
            continue
        if trained and stop.requested:
            stop.stopped_at = f"stage {number - 1} of {len(names)}"
            return trained
        _write_status(path, names, final_states, under_way=stage.name)
        console.print(f"[bold]stage {number} of {len(names)}: {stage.name}[/]", highlight=False)
        connect = connecting(stage_config)
        if stage_config.mode == "bench":
            of = folder_path(trained[0]) if trained else None
            await bench(stage_config, partial(_connect_models, connect), console, of, stop if trained else None)
            if trained and stop.stopped_at:
                return trained
            final_states[stage.name] = previous
            continue
        if previous and stage.keep_optimizer:
            connect = _connect_with_state(connect, previous)
        trained = stage_config, await train(stage_config, connect, console, stop)
        if stop.stopped_at:
            return trained
        final_states[stage.name] = trained[1].result_path
    _write_status(path, names, final_states, under_way="")
    assert trained is not None  # RunConfig requires a stage that trains
    return trained


async def _connect_models(connect: Connect) -> Models:
    return (await connect("", 0)).models


def _connect_with_state(connect: Connect, previous: str) -> Connect:
    """A Connect that starts from the weights and optimizer state at the path `previous`."""

    async def connect_stage(state: str, version: int) -> Trainer:
        return await connect(state or previous, version)

    return connect_stage


def _final_states(path: Path, names: list[str]) -> dict[str, str]:
    """The final state path of each finished stage, by name. Raises ConfigError if the folder holds other stages."""
    file = Layout(path).stages
    if not file.exists():
        return {}
    status = json.loads(file.read_text(encoding="utf-8"))
    ended, under_way = status["ended"], status["under_way"]
    started = [*ended, *([under_way] if under_way not in ("", *ended) else [])]
    if started != names[: len(started)]:
        raise ConfigError(
            f"{path} holds a run of the stages {', '.join(started)}.",
            "Restore these stages to resume it, or set another folder, e.g. folder=runs/another.",
        )
    return dict(ended)


def _write_status(path: Path, names: list[str], final_states: dict[str, str], under_way: str) -> None:
    status = {"stages": names, "under_way": under_way, "ended": final_states}
    atomic_write(Layout(path).stages, json.dumps(status, indent=2).encode())
