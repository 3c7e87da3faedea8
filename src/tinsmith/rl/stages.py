"""A run's stages, one after the other: each a run of its own, from the weights of the one before.

    stages.json     which stage is under way, and where each one ended
    run.yaml        the settings of all
    01-NAME/        the first stage's folder, as any run's (resume.py); 02-NAME/ the second's

A run killed in the middle of a stage goes on in that stage; the finished ones are left alone. A stage of mode bench
compares the checkpoints of the one before. A run without stages is run as it is, in its own folder.
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
from tinsmith.rl.policy.base import Policy
from tinsmith.rl.run import Connect, folder_path, with_fresh_folder
from tinsmith.rl.run_folder import RunFolder, State
from tinsmith.rl.train import train

_FILE = "stages.json"


async def run_stages(
    config: RunConfig, connecting: Callable[[RunConfig], Connect], console: Console
) -> tuple[RunConfig, State]:
    """Run all remaining stages; returns the settings and the last state of the last stage that trains.

    `connecting` returns the Connect function for the settings of a stage; all stages use one server.
    """
    config = with_fresh_folder(config)
    path = folder_path(config)
    if not config.stages:
        if (path / _FILE).exists():
            raise ConfigError(f"{path} holds a run in stages.", "Set another folder, as in folder=runs/another.")
        return config, await train(config, connecting(config), console)
    folder = RunFolder.open(path, config.model_dump(mode="json"), resume=config.resume)
    try:
        if folder.state is not None:
            raise ConfigError(f"{path} holds a run without stages.", "Set another folder, as in folder=runs/another.")
        return await _in_turn(config, path, connecting, console)
    finally:
        folder.close()


async def _in_turn(
    config: RunConfig, path: Path, connecting: Callable[[RunConfig], Connect], console: Console
) -> tuple[RunConfig, State]:
    names = [stage.name for stage in config.stages]
    ended = _ended(path, names)
    trained: tuple[RunConfig, State] | None = None
    for number, stage in enumerate(config.stages, 1):
        before = trained[1].path if trained else ""
        stage_config = config.stage_config(number, before)
        if stage_config.mode == "bench" and ended.get(stage.name) == before:
            continue
        _write_status(path, names, ended, under_way=stage.name)
        console.print(f"[bold]stage {number} of {len(names)}: {stage.name}[/]", highlight=False)
        connect = connecting(stage_config)
        if stage_config.mode == "bench":
            await bench(stage_config, partial(connect, "", 0), console, of=folder_path(trained[0]) if trained else None)
            ended[stage.name] = before
            continue
        if before and stage.keep_optimizer:
            connect = _continuing_from(connect, before)
        trained = stage_config, await train(stage_config, connect, console)
        ended[stage.name] = trained[1].path
    _write_status(path, names, ended, under_way="")
    assert trained is not None  # there is a stage that trains
    return trained


def _continuing_from(connect: Connect, before: str) -> Connect:
    """A Connect that starts from the weights and optimizer state at the path `before`."""

    async def connect_stage(state: str, version: int) -> Policy:
        return await connect(state or before, version)

    return connect_stage


def _ended(path: Path, names: list[str]) -> dict[str, str]:
    """The final weights of each finished stage, by name. Raises ConfigError if the folder holds other stages."""
    file = path / _FILE
    if not file.exists():
        return {}
    known = json.loads(file.read_text(encoding="utf-8"))
    begun = [*known["ended"], *([known["under_way"]] if known["under_way"] not in ("", *known["ended"]) else [])]
    if begun != names[: len(begun)]:
        raise ConfigError(
            f"{path} holds a run of the stages {', '.join(begun)}.",
            "Put them back to go on with it, or set another folder, as in folder=runs/another.",
        )
    return dict(known["ended"])


def _write_status(path: Path, names: list[str], ended: dict[str, str], under_way: str) -> None:
    status = {"stages": names, "under_way": under_way, "ended": ended}
    atomic_write(path / _FILE, json.dumps(status, indent=2).encode())
