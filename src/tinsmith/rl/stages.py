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
    """Every stage that is still to do; the settings of the last one that trains, and where it ended.

    `connecting` gives the way to a policy of one stage's settings; all are on one server.
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
        one = config.stage_config(number, before)
        if one.mode == "bench" and ended.get(stage.name) == before:
            continue
        _tell(path, names, ended, under_way=stage.name)
        console.print(f"[bold]stage {number} of {len(names)}: {stage.name}[/]", highlight=False)
        connect = connecting(one)
        if one.mode == "bench":
            await bench(one, partial(connect, "", 0), console, of=folder_path(trained[0]) if trained else None)
            ended[stage.name] = before
            continue
        if before and stage.keep_optimizer:
            connect = _going_on(connect, before)
        trained = one, await train(one, connect, console)
        ended[stage.name] = trained[1].path
    _tell(path, names, ended, under_way="")
    assert trained is not None  # there is a stage that trains
    return trained


def _going_on(connect: Connect, before: str) -> Connect:
    """Where a stage begins, with weights and optimizer of the path `before`."""

    async def found(state: str, version: int) -> Policy:
        return await connect(state or before, version)

    return found


def _ended(path: Path, names: list[str]) -> dict[str, str]:
    """Where each finished stage ended. Raises ConfigError where the folder holds other stages."""
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


def _tell(path: Path, names: list[str], ended: dict[str, str], under_way: str) -> None:
    told = {"stages": names, "under_way": under_way, "ended": ended}
    atomic_write(path / _FILE, json.dumps(told, indent=2).encode())
