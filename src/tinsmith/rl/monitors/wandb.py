"""A run in Weights & Biases: metrics by step, settings as its config. Wants the package wandb.

Rollouts stay in the run folder. A step that is done again after a break is there twice, the later one last: the
service takes nothing back.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Literal

from tinsmith.rl.monitors.base import Kind, RunInfo
from tinsmith.rl.monitors.trackers import Project, kept, missing
from tinsmith.rl.types import Group


class WandbConfig(Project):
    """Weights & Biases."""

    type: Literal["wandb"] = "wandb"
    mode: Literal["", "online", "offline", "disabled"] = ""
    """offline writes to the run folder, for `wandb sync` later; empty: WANDB_MODE, else online, which wants a key."""
    entity: str = ""
    """User or team; empty: the key's own."""
    base_url: str = ""
    """A server of one's own; empty: WANDB_BASE_URL, else the public one."""


class WandbMonitor:
    """Opens the tracker's run; goes on with it where the folder knows one."""

    def __init__(self, config: WandbConfig, info: RunInfo) -> None:
        """Raises ConfigError without the package, wandb's own error without a key."""
        try:
            import wandb
        except ImportError as error:
            raise missing("wandb", "wandb") from error
        self._config = config
        settings = wandb.Settings(silent=True)
        if config.base_url:
            settings.base_url = config.base_url
        self._run = wandb.init(
            project=config.project,
            entity=config.entity or None,
            group=config.group or None,
            name=config.name or info.name,
            tags=config.tags,
            mode=config.mode or None,
            dir=info.folder,
            id=kept(info, "wandb", lambda: secrets.token_hex(8)),
            resume="allow",
            config=dict(info.settings),
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Training and evaluation of a step are two rows; charts join them by `step`."""
        self._run.log({"step": step, **self._config.told(values)})

    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        """Not sent."""

    def close(self) -> None:
        """Waits until all is written or sent."""
        self._run.finish()
