"""The table of monitors. The run folder's own files come first and always: the report reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from rich.console import Console

from tinsmith.rl.monitors.base import Monitors, RunInfo
from tinsmith.rl.monitors.console import ConsoleConfig, ConsoleMonitor
from tinsmith.rl.monitors.jsonl import JsonlMonitor
from tinsmith.rl.monitors.report import ReportConfig, ReportMonitor

MonitorConfig = Annotated[ConsoleConfig | ReportConfig, Field(discriminator="type")]


def build(configs: Sequence[MonitorConfig], info: RunInfo, console: Console) -> Monitors:
    """Everything that is told of the run."""
    made: list[ConsoleMonitor | ReportMonitor] = [
        ConsoleMonitor(config, info, console) if isinstance(config, ConsoleConfig) else ReportMonitor(config, info)
        for config in configs
    ]
    return Monitors([JsonlMonitor(info), *made])
