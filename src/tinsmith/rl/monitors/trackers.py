"""Monitors that write metrics to TensorBoard, Weights & Biases and MLflow; rollouts stay in the run folder.

The tracker's id of the run is stored in trackers.json of the run folder, so a resumed run continues there.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tinsmith.errors import ConfigError
from tinsmith.rl.monitors.base import Kind, RunInfo
from tinsmith.rl.monitors.trinity_names import trinity_name
from tinsmith.rl.types import Group
from tinsmith.settings import Settings


class TrackerConfig(Settings):
    """Settings of every tracker."""

    names: Literal["tinsmith", "trinity"] = "tinsmith"
    """Of metrics: ours, or Trinity-RFT's where it has the same one."""

    def renamed(self, values: Mapping[str, float]) -> dict[str, float]:
        """The metrics under the names that are wanted."""
        if self.names == "tinsmith":
            return dict(values)
        return {trinity_name(name): value for name, value in values.items()}


class ProjectConfig(TrackerConfig):
    """What trackers have that hold many runs."""

    project: str = "tinsmith"
    """Under which runs are gathered."""
    group: str = ""
    """Of runs to be compared; empty: none."""
    name: str = ""
    """Of the run; empty: the run's own."""
    tags: tuple[str, ...] = ()
    """Words to find it by."""


def tracker_run_id(info: RunInfo, tracker: str, make: Callable[[], str]) -> str:
    """The id of this run in `tracker`; made the first time."""
    file = info.folder / "trackers.json"
    ids: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    if tracker not in ids:
        file.write_text(json.dumps({**ids, tracker: make()}) + "\n")
        return tracker_run_id(info, tracker, make)
    return ids[tracker]


def missing_package(package: str, extra: str) -> ConfigError:
    """The error of a tracker whose package is not installed."""
    return ConfigError(f"monitors: {extra} wants the package {package}.", f"pip install 'tinsmith[{extra}]'")


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as dotted keys and texts; what is empty is left out."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}.")
        elif value not in (None, "", [], ()):
            found[prefix + key] = str(value)
    return found


class TensorboardConfig(TrackerConfig):
    """TensorBoard files in the run folder."""

    type: Literal["tensorboard"] = "tensorboard"
    folder: str = ""
    """Where to; empty: `tensorboard` in the run folder."""


class TensorboardMonitor:
    """Appends; what was written after the step that the run goes on from is hidden."""

    def __init__(self, config: TensorboardConfig, info: RunInfo) -> None:
        """Raises ConfigError without the package."""
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise missing_package("tensorboard", "tensorboard") from error
        self._config = config
        folder = config.folder or str(info.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=info.start + 1 if info.start else None)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """On disk within seconds, so that the page may follow."""
        for name, value in self._config.renamed(values).items():
            self._writer.add_scalar(name, value, step)

    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        """Not written."""

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class WandbConfig(ProjectConfig):
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
            raise missing_package("wandb", "wandb") from error
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
            id=tracker_run_id(info, "wandb", lambda: secrets.token_hex(8)),
            resume="allow",
            config=dict(info.settings),
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Training and evaluation of a step are two rows; charts join them by `step`."""
        self._run.log({"step": step, **self._config.renamed(values)})

    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        """Not sent."""

    def close(self) -> None:
        """Waits until all is written or sent."""
        self._run.finish()


_LONGEST = 500
"""Of a parameter's text; MLflow refuses longer ones."""
_AT_ONCE = 100
"""Parameters in a request."""


class MlflowConfig(ProjectConfig):
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
            raise missing_package("mlflow-skinny", "mlflow") from error
        self._config = config
        beside = f"sqlite:///{info.folder.resolve().parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=config.uri or os.environ.get("MLFLOW_TRACKING_URI", "") or beside)
        self._run = tracker_run_id(info, "mlflow", lambda: self._made(info))
        self._client.update_run(self._run, status="RUNNING")
        self._sent: list[Any] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One request for all; `@`, which MLflow refuses in names, is `_at_`."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entries = [
            Metric(name.replace("@", "_at_"), value, now, step) for name, value in self._config.renamed(values).items()
        ]
        self._sent.append(self._client.log_batch(self._run, metrics=entries, synchronous=False))

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
        given = [Param(key, value[:_LONGEST]) for key, value in flatten(info.settings).items()]
        for begin in range(0, len(given), _AT_ONCE):
            self._client.log_batch(run, params=given[begin : begin + _AT_ONCE])
        return run
