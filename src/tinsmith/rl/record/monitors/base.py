"""The monitor protocol: a monitor receives the metrics and rollouts of every step. `Monitors` forwards to several.

Creating a monitor may raise, because a configured monitor must work. A monitor that fails later does not stop the run:
each failure is logged. Only the files of the run folder must be written: if they cannot be, the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from tinsmith.rl.diagnosis import Diagnosis, LiveDiagnosis
from tinsmith.rl.guards.user_code import describe, is_fault
from tinsmith.rl.record.layout import Kind
from tinsmith.rl.types import Group

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Description of a run for its monitors.

    Example: RunInfo(name="demo", folder=Path("runs/demo"), steps=60, start=0, settings={"steps": 60})
    """

    name: str
    folder: Path
    steps: int
    start: int = 0
    """Number of steps completed before this process."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    not_evaluated: str = ""
    """Why held-out tasks of the run are not evaluated; empty if they are, or if there are none."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Text of token ids with special tokens, by the policy's tokenizer; None if there is none."""
    token_text: Callable[[int], str] | None = None
    """Text of a single token, by the same tokenizer."""


class Monitor(Protocol):
    """Receives the metrics and rollouts of a run, in order of steps. Step 0 is before the first update."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Receive metrics of a step. Training and evaluation of a step are two calls."""
        ...

    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        """Receive all groups that were sampled for a step or an evaluation."""
        ...

    def diagnosis(self, step: int, diagnosis: Diagnosis) -> None:
        """Receive the diagnosis after `step` when it has other findings than before, and before `close`."""
        del step, diagnosis  # unless the monitor shows it

    def close(self) -> None:
        """Release everything. Called once, when the run ends or is interrupted."""
        ...

    @property
    def required(self) -> bool:
        """Whether the run ends if the monitor cannot write its files."""
        return False


def roles_of(values: Mapping[str, float], prefix: str = "reward") -> list[str]:
    """Roles of a run of several roles, from its metrics PREFIX/ROLE/mean."""
    parts = (name.removeprefix(f"{prefix}/").split("/") for name in values if name.startswith(f"{prefix}/"))
    return [part[0] for part in parts if len(part) == 2 and part[1] == "mean"]


class Monitors(Monitor):
    """Forwards to all monitors of a run, and logs those that fail. Adds the diagnosis of the metrics."""

    def __init__(self, monitors: Sequence[Monitor], live: LiveDiagnosis | None = None) -> None:
        """`live`: diagnoses the run; by default one without settings."""
        self._monitors = tuple(monitors)
        self._live, self._step = live or LiveDiagnosis({}), 0

    @override
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._forward(lambda monitor: monitor.metrics(step, values))
        self._step = step
        if (changed := self._live.observe(step, values)) is not None:
            self.diagnosis(step, changed)

    @override
    def diagnosis(self, step: int, diagnosis: Diagnosis) -> None:
        self._forward(lambda monitor: monitor.diagnosis(step, diagnosis))

    @override
    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        self._forward(lambda monitor: monitor.rollouts(step, kind, groups))

    @override
    def close(self) -> None:
        """Hand the last diagnosis to the monitors, and close them."""
        final = self._live.result()
        self._forward(lambda monitor: monitor.diagnosis(self._step, final), closing=True)
        self._forward(lambda monitor: monitor.close(), closing=True)

    def _forward(self, call: Callable[[Monitor], None], *, closing: bool = False) -> None:
        for monitor in self._monitors:
            with _failures_logged(monitor, required=monitor.required and not closing):
                call(monitor)


@contextmanager
def _failures_logged(monitor: Monitor, *, required: bool) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not is_fault(error) or (isinstance(error, OSError) and required):
            raise
        log.warning("The monitor %s failed: %s", type(monitor).__name__, describe(error))
