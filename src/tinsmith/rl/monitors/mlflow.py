"""A run in MLflow: metrics by step, settings as its parameters. Wants the package mlflow-skinny (or mlflow).

Rollouts stay in the run folder. Metrics are sent behind the run's back, so a slow server delays nothing; what could not
be sent is told at the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tinsmith.rl.monitors.base import Kind, RunInfo
from tinsmith.rl.monitors.trackers import Project, flat, kept, missing
from tinsmith.rl.types import Group

_LONGEST = 500
"""Of a parameter's text; MLflow refuses longer ones."""
_AT_ONCE = 100
"""Parameters in a request."""


class MlflowConfig(Project):
    """MLflow: a server, a database or a folder."""

    type: Literal["mlflow"] = "mlflow"
    uri: str = ""
    """As http://host:5000, sqlite:///mlflow.db or a folder; empty: MLFLOW_TRACKING_URI, else mlflow.db beside the run
    folder. A name and a password: MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD."""


class MlflowMonitor:
    """Opens the tracker's run; goes on with it where the folder knows one."""

    def __init__(self, config: MlflowConfig, info: RunInfo) -> None:
        """Raises ConfigError without the package, MLflow's own error where the store cannot be opened."""
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise missing("mlflow-skinny", "mlflow") from error
        self._config = config
        beside = f"sqlite:///{info.folder.resolve().parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=config.uri or os.environ.get("MLFLOW_TRACKING_URI", "") or beside)
        self._run = kept(info, "mlflow", lambda: self._made(info))
        self._client.update_run(self._run, status="RUNNING")
        self._sent: list[Any] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One request for all; `@`, which MLflow refuses in names, is `_at_`."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        told = [
            Metric(name.replace("@", "_at_"), value, now, step) for name, value in self._config.told(values).items()
        ]
        self._sent.append(self._client.log_batch(self._run, metrics=told, synchronous=False))

    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        """Not sent."""

    def close(self) -> None:
        """Waits until all is sent."""
        try:
            for sent in self._sent:
                sent.wait()
        finally:
            self._client.set_terminated(self._run)

    def _made(self, info: RunInfo) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(self._config.project)
        project = found.experiment_id if found else self._client.create_experiment(self._config.project)
        tags = dict.fromkeys(self._config.tags, "")
        if self._config.group:
            tags["group"] = self._config.group
        run = self._client.create_run(project, run_name=self._config.name or info.name, tags=tags).info.run_id
        given = [Param(key, value[:_LONGEST]) for key, value in flat(info.settings).items()]
        for begin in range(0, len(given), _AT_ONCE):
            self._client.log_batch(run, params=given[begin : begin + _AT_ONCE])
        return run
