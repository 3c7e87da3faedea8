"""The folder of a sweep: its files, and what it must know to go on after it was killed.

sweep.json       how each run stands, on which server it is, and what halving has decided
results.json     the outcome: settings, best first, and their runs
sweep.html       the outcome as a page
best.yaml        the run file of the best run
logs/NAME.txt    what each run printed
NAME/            the run folder of each run
service/         the data folder of the service that the sweep started
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from tinsmith.atomic import atomic_write
from tinsmith.errors import ConfigError
from tinsmith.rl.record.layout import Layout
from tinsmith.rl.run.folder import lock_run
from tinsmith.settings import Settings, writable_folder

_ERROR = "error: "
"""How a command prints an error."""

Status = Literal["waiting", "running", "finished", "stopped", "ended", "failed"]
"""`stopped`: before its last step, and the same command continues it; `ended`: by halving."""


class RunRecord(Settings):
    """What a sweep remembers of a run."""

    server: str = ""
    """URL of its server, which has its checkpoints; empty: the sweep's own service, or none yet."""
    status: Status = "waiting"
    digest: str = ""
    """Of the settings with which it finished: with others it may have steps left."""


class SweepRecord(Settings):
    """What a sweep remembers."""

    halving: str = ""
    """The metric, the share and the settings of the decisions below, in words."""
    decided: dict[int, list[str]] = Field(default_factory=dict)
    """Step -> the settings that go on after it."""
    runs: dict[str, RunRecord] = Field(default_factory=dict)


class SweepFolder:
    """Paths of a sweep, and its record."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.results, self.page, self.best = (
            Layout(self.path).results,
            self.path / "sweep.html",
            self.path / "best.yaml",
        )
        self._state, self._logs = self.path / "sweep.json", self.path / "logs"

    def run(self, name: str) -> Path:
        """The run folder of a run."""
        return self.path / name

    def log(self, name: str) -> Path:
        """The file with what a run prints."""
        return self._logs / f"{name}.txt"

    def last_words(self, name: str) -> str:
        """The error that a run printed last, or where to read what it printed."""
        file = self.log(name)
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
        errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
        return f"{errors[-1]} ({file})" if errors else f"see {file}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one process. Raises ConfigError if another one has it, or if it cannot be written."""
        writable_folder(self.path, "out")
        self._logs.mkdir(exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            lock_run(lock, self.path)
            yield

    def read(self) -> SweepRecord:
        """The record; an empty one in a new folder. Raises ConfigError if it is damaged or the folder is a run's."""
        if Layout(self.path).settings.exists():
            raise ConfigError(f"{self.path} is the folder of a run.", "Set --out to another folder.")
        if not self._state.exists():
            return SweepRecord()
        try:
            return SweepRecord.model_validate_json(self._state.read_bytes())
        except ValidationError as error:
            raise ConfigError(f"{self._state} is damaged.", "Restore it, or set --out to another folder.") from error

    def write(self, record: SweepRecord) -> None:
        """Write the record; durable when this returns."""
        atomic_write(self._state, record.model_dump_json(indent=2).encode())
