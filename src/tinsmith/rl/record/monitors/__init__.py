"""Monitors receive the metrics and rollouts of a run. `JsonlMonitor` is always on; the report reads its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from rich.console import Console
from rich.markup import escape

from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.rl.diagnosis import LiveDiagnosis
from tinsmith.rl.record.monitors.background import BackgroundMonitor
from tinsmith.rl.record.monitors.base import Monitor, Monitors, RunInfo
from tinsmith.rl.record.monitors.console import ConsoleConfig, ConsoleMonitor
from tinsmith.rl.record.monitors.jsonl import JsonlMonitor, read_metrics
from tinsmith.rl.record.monitors.preflight import offline_reason, preflight
from tinsmith.rl.record.monitors.report import ReportConfig, ReportMonitor
from tinsmith.rl.record.monitors.trackers import (
    MlflowConfig,
    MlflowMonitor,
    TensorboardConfig,
    TensorboardMonitor,
    WandbConfig,
    WandbMonitor,
)
from tinsmith.rl.record.monitors.trackio import TrackioConfig, TrackioMonitor
from tinsmith.rl.record.monitors.user_code import CustomMonitor
from tinsmith.settings import Settings

__all__ = ["MonitorConfig", "Monitors", "announce", "build", "preflight"]

_OTHERS = "use tensorboard, mlflow, trackio, or wandb (mode: offline needs no account)"
_INSTEAD = {
    "swanlab": f"its package requires protobuf below 7; {_OTHERS}",
    "clearml": f"there is no monitor for it; {_OTHERS}",
    "file": "the run folder always has metrics.jsonl and rollouts/; leave it out",
    "ui": "use report, a page in the run folder",
}
"""Monitors of other systems, and what to use in their place."""


class UnsupportedMonitor(Settings):
    """Monitors of other systems that Tinsmith does not have: the error says what to use in their place."""

    type: Literal["swanlab", "clearml", "file", "ui"] = "swanlab"

    @model_validator(mode="before")
    @classmethod
    def _reject(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        raise ValueError(f"{values['type']} is not supported: {_INSTEAD[values['type']]}")


MonitorConfig = Annotated[
    ConsoleConfig
    | ReportConfig
    | TensorboardConfig
    | WandbConfig
    | MlflowConfig
    | TrackioConfig
    | CustomMonitor
    | UnsupportedMonitor,
    Field(discriminator="type"),
]


def announce(configs: Sequence[MonitorConfig], folder: Path, console: Console) -> None:
    """Print the notes of `preflight`, before the model is loaded. Raises ConfigError for a monitor that cannot run."""
    for note in preflight(configs, folder):
        console.print(f"[dim]note: {escape(note)}[/]", highlight=False, soft_wrap=True)


def build(configs: Sequence[MonitorConfig], info: RunInfo, console: Console) -> Monitors:
    """Create the monitors of a run. If one cannot be created, the others are closed; raises ConfigError."""
    monitors: list[Monitor] = [JsonlMonitor(info)]
    try:
        for config in configs:
            with _one_sentence(config):
                monitors.append(_monitor(config, info, console))
    except BaseException:
        Monitors(monitors).close()
        raise
    earlier = [row for row in read_metrics(info.folder) if row["step"] <= info.start] if info.start else []
    return Monitors(monitors, LiveDiagnosis(info.settings, earlier))


@contextmanager
def _one_sentence(config: MonitorConfig) -> Iterator[None]:
    """Raise errors of a tracker's package as ConfigErrors that name the monitor."""
    try:
        yield
    except TinsmithError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"monitors: {config.type} did not start: {reason}", "Correct its settings, or remove it from monitors."
        ) from error


def _monitor(config: MonitorConfig, info: RunInfo, console: Console) -> Monitor:
    match config:
        case ConsoleConfig():
            return ConsoleMonitor(config, info, console)
        case ReportConfig():
            return ReportMonitor(config, info)
        case TensorboardConfig():
            return BackgroundMonitor(TensorboardMonitor(config, info))
        case WandbConfig():
            offline = {"mode": "offline"} if offline_reason(config) else {}
            wandb = WandbMonitor(config.model_copy(update=offline), info)
            return BackgroundMonitor(wandb, with_rollouts=config.rollouts > 0)
        case MlflowConfig():
            return BackgroundMonitor(MlflowMonitor(config, info), with_rollouts=config.rollouts > 0)
        case TrackioConfig():
            return BackgroundMonitor(TrackioMonitor(config, info), with_rollouts=config.rollouts > 0)
        case CustomMonitor():
            return config.make(info)
        case UnsupportedMonitor():
            raise AssertionError("rejected by its validator")
