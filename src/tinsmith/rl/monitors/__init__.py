"""Monitors receive the metrics and rollouts of a run. `JsonlMonitor` is always on; the report reads its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from rich.console import Console

from tinsmith.rl.monitors.base import Monitor, Monitors, RunInfo
from tinsmith.rl.monitors.console import ConsoleConfig, ConsoleMonitor
from tinsmith.rl.monitors.jsonl import JsonlMonitor
from tinsmith.rl.monitors.report import ReportConfig, ReportMonitor
from tinsmith.rl.monitors.trackers import (
    MlflowConfig,
    MlflowMonitor,
    TensorboardConfig,
    TensorboardMonitor,
    WandbConfig,
    WandbMonitor,
)
from tinsmith.settings import Settings

_OTHERS = "use tensorboard, mlflow, or wandb (mode: offline needs no account)"
_INSTEAD = {
    "swanlab": f"its package requires protobuf below 7; {_OTHERS}",
    "clearml": f"there is no monitor for it; {_OTHERS}",
    "trackio": f"there is no monitor for it; {_OTHERS}",
    "file": "the run folder always has metrics.jsonl and rollouts/; leave it out",
    "ui": "use report, a page in the run folder",
}
"""Monitors of other systems, and what to use in their place."""


class UnsupportedMonitor(Settings):
    """Monitors of other systems that Tinsmith does not have: the error says what to use in their place."""

    type: Literal["swanlab", "clearml", "trackio", "file", "ui"] = "swanlab"

    @model_validator(mode="before")
    @classmethod
    def _reject(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        raise ValueError(f"{values['type']} is not supported: {_INSTEAD[values['type']]}")


MonitorConfig = Annotated[
    ConsoleConfig | ReportConfig | TensorboardConfig | WandbConfig | MlflowConfig | UnsupportedMonitor,
    Field(discriminator="type"),
]


def build(configs: Sequence[MonitorConfig], info: RunInfo, console: Console) -> Monitors:
    """Create the monitors of a run. If one cannot be created, the others are closed and its error is raised."""
    monitors: list[Monitor] = [JsonlMonitor(info)]
    try:
        for config in configs:
            monitors.append(_monitor(config, info, console))
    except BaseException:
        Monitors(monitors).close()
        raise
    return Monitors(monitors)


def _monitor(config: MonitorConfig, info: RunInfo, console: Console) -> Monitor:
    match config:
        case ConsoleConfig():
            return ConsoleMonitor(config, info, console)
        case ReportConfig():
            return ReportMonitor(config, info)
        case TensorboardConfig():
            return TensorboardMonitor(config, info)
        case WandbConfig():
            return WandbMonitor(config, info)
        case MlflowConfig():
            return MlflowMonitor(config, info)
        case UnsupportedMonitor():
            raise AssertionError("rejected by its validator")
