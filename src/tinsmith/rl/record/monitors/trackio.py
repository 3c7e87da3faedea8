"""Trackio: a monitor that sends metrics to a project on this machine, on a server of one's own, or in a Space."""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import model_validator
from typing_extensions import override

from tinsmith.rl.diagnosis import Diagnosis
from tinsmith.rl.record.layout import Kind
from tinsmith.rl.record.monitors.base import RunInfo
from tinsmith.rl.record.monitors.rollout_tables import COLUMNS
from tinsmith.rl.record.monitors.trackers import (
    DIAGNOSIS,
    ProjectConfig,
    Tracker,
    import_package,
    stored_run_id,
)


class TrackioConfig(ProjectConfig):
    """Trackio: files on this machine, or a server."""

    type: Literal["trackio"] = "trackio"
    server_url: str = ""
    """Address of a Trackio server of one's own. Empty: the environment variable TRACKIO_SERVER_URL, else the folder
    TRACKIO_DIR of this machine, which `trackio show` reads."""
    space_id: str = ""
    """Space of the Hugging Face hub with the project, such as me/runs. Empty: TRACKIO_SPACE_ID, else none."""

    @model_validator(mode="after")
    def _check_place(self) -> TrackioConfig:
        if self.server_url and self.space_id:
            raise ValueError("server_url and space_id name two places; leave out one")
        if self.tags:
            raise ValueError("trackio has no tags; use group or name")
        return self


class TrackioMonitor(Tracker):
    """Creates a run in Trackio, or continues the one in trackers.json. Trackio knows runs by their names."""

    def __init__(self, config: TrackioConfig, info: RunInfo) -> None:
        """Raise ConfigError if Trackio is not installed, and Trackio's own error if it cannot start."""
        super().__init__(config)
        trackio = import_package("trackio", package="trackio", extra="trackio")
        name = config.name or info.name
        with _quiet():
            self._run = trackio.init(
                project=config.project,
                name=stored_run_id(info, "trackio", lambda: f"{name}-{secrets.token_hex(3)}"),
                group=config.group or None,
                space_id=config.space_id or None,
                server_url=config.server_url or None,
                config=dict(info.settings),
                resume="allow",
                embed=False,
            )
        self._make_table = trackio.Table

    @override
    def _log_rollouts(self, step: int, kind: Kind, rows: Sequence[Sequence[Any]]) -> None:
        table = self._make_table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._run.log({f"rollouts/{kind}": table}, step=step)

    @override
    def diagnosis(self, step: int, diagnosis: Diagnosis) -> None:
        self._run.log({DIAGNOSIS: diagnosis.text}, step=step)

    @override
    def close(self) -> None:
        """Wait until everything is written or sent."""
        with _quiet():
            self._run.finish()

    @override
    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Without what Trackio prints to the terminal, where the console of the run is."""
    return contextlib.redirect_stdout(io.StringIO())
