"""A small run with the scripted policy: it has three replies, and one of them is worth something."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.scripted import ScriptedPolicy
from tinsmith.rl.train import train

REPLIES = ("no", "yes", "perhaps")


def settings(folder: Path, **changes: Any) -> RunConfig:
    values = {
        "model": {"name": "scripted"},
        "tasks": {"train": {"type": "addition"}, "held_out": 5},
        "rewards": [{"type": "format", "pattern": "yes"}],
        "steps": 8,
        "groups_per_step": 3,
        "group_size": 4,
        "optimizer": {"learning_rate": 0.2},
        "eval": {"every": 4},
        "checkpoint": {"every": 3},
        "monitors": [],
        "name": "small",
        "folder": str(folder),
    }
    return RunConfig.model_validate({**values, **changes})


def scripted(folder: Path):
    async def connect(state: str, version: int) -> ScriptedPolicy:
        return ScriptedPolicy(REPLIES, folder / "weights", state=state, version=version)

    return connect


def run(config: RunConfig, connect=None, console: Console | None = None):
    """Trains to the end and returns the state."""
    return asyncio.run(train(config, connect or scripted(Path(config.folder)), console or Console(file=io.StringIO())))


def rows(folder: Path, *, timeless: bool = True) -> list[dict[str, float]]:
    """metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocked = ("time/", "speed/")
    return [
        {name: value for name, value in row.items() if not (timeless and name.startswith(clocked))} for row in lines
    ]


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


def breaking(folder: Path, *, calls: int, at: str):
    """A policy that is killed at the given call of one of its methods."""
    left = [calls]

    async def connect(state: str, version: int):
        policy = ScriptedPolicy(REPLIES, folder / "weights", state=state, version=version)
        method = getattr(policy, at)

        async def deadly(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return await method(*args, **kwargs)

        setattr(policy, at, deadly)
        return policy

    return connect
