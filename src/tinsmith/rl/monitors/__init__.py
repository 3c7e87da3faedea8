"""Monitors receive the metrics and rollouts of a run. `JsonlMonitor` is always on; the report reads its files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

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


class SwanlabConfig(Settings):
    """SwanLab, which is not supported: its package requires an older protobuf than Tinsmith's other dependencies."""

    type: Literal["swanlab"] = "swanlab"

    @model_validator(mode="after")
    def _reject(self) -> SwanlabConfig:
        raise ValueError(
            "swanlab is not supported, because its package requires protobuf below 7; "
            "use tensorboard, mlflow, or wandb (mode: offline needs no account)"
        )


MonitorConfig = Annotated[
    ConsoleConfig | ReportConfig | TensorboardConfig | WandbConfig | MlflowConfig | SwanlabConfig,
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
        case SwanlabConfig():
            raise AssertionError("rejected by its validator")
