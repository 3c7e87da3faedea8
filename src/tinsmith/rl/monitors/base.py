"""The monitor protocol: a monitor receives the metrics and rollouts of every step. `Monitors` forwards to several.

Making a monitor may raise: one that is configured must work. Telling it never stops a run: a monitor that fails is
named in the log, with the reason, each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from tinsmith.rl.types import Group

log = logging.getLogger(__name__)

Kind = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a monitor may know of its run.

    Example: RunInfo(name="demo", folder=Path("runs/demo"), steps=60, start=0, settings={"steps": 60})
    """

    name: str
    folder: Path
    steps: int
    start: int = 0
    """Steps done before this process."""
    settings: Mapping[str, Any] = field(default_factory=dict)


class Monitor(Protocol):
    """Told in order; step 0 is before the first update."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step; a step may come twice, for training and for evaluation."""
        ...

    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        """Everything that was sampled for a step or an evaluation."""
        ...

    def close(self) -> None:
        """The run is over, or broken off."""
        ...


class Monitors:
    """All monitors of a run as one."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._monitors = tuple(monitors)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """To each."""
        self._forward(lambda monitor: monitor.metrics(step, values))

    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        """To each."""
        self._forward(lambda monitor: monitor.rollouts(step, kind, groups))

    def close(self) -> None:
        """To each."""
        self._forward(lambda monitor: monitor.close())

    def _forward(self, say: Callable[[Monitor], None]) -> None:
        for monitor in self._monitors:
            with _never_stopping(monitor):
                say(monitor)


@contextmanager
def _never_stopping(monitor: Monitor) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  a full disk or a closed terminal must not end a run of days
        log.warning("The monitor %s failed: %s: %s", type(monitor).__name__, type(error).__name__, error)
