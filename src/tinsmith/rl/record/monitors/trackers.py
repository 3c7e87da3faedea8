"""Experiment trackers: monitors that send metrics to TensorBoard, Weights & Biases, MLflow and Trackio.

Rollouts stay in the run folder, but for a number of them that the setting `rollouts` names. The tracker's id of a run
is stored in trackers.json of the run folder, so that a resumed run continues in the same run of the tracker.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import FunctionType
from typing import Any, Literal

from pydantic import Field, field_validator
from typing_extensions import override

from tinsmith import entry_points
from tinsmith.atomic import atomic_write
from tinsmith.entry_points import OWN
from tinsmith.errors import ConfigError
from tinsmith.rl.diagnosis import Diagnosis
from tinsmith.rl.record.layout import Kind, Layout
from tinsmith.rl.record.monitors.base import Monitor, RunInfo
from tinsmith.rl.record.monitors.rollout_tables import COLUMNS, rollout_rows
from tinsmith.rl.types import Group
from tinsmith.settings import Settings, did_you_mean, flatten

NAMES_GROUP = "tinsmith.metric_names"
"""Group of entry points: each names a function from a metric's name to that of another system."""
_MLFLOW_PARAM_LENGTH = 500
"""Characters of a parameter's value. MLflow rejects longer values."""
_MLFLOW_TAG_LENGTH = 5000
"""Characters of a tag's value."""
_MLFLOW_TABLES, _MLFLOW_SHOWN_TABLES = "mlflow.loggedArtifacts", 50
"""Tag with the tables of a run, and the number of them that fit its value."""
_MLFLOW_BATCH = 100
"""Parameters per request to MLflow."""


class TrackerConfig(Settings):
    """Settings of all trackers."""

    names: str = OWN
    """Metric names: `tinsmith`, or another system's for the metrics that it has: `trinity`."""

    @field_validator("names")
    @classmethod
    def _check_names(cls, names: str) -> str:
        systems = (OWN, *(entry_points.load(NAMES_GROUP, FunctionType) if names != OWN else ()))
        if names in systems:
            return names
        fix = did_you_mean(names, systems) or f"Known here: {', '.join(systems)}."
        raise ValueError(f"there are no metric names of {names}. {fix}")

    @cached_property
    def _renaming(self) -> Callable[[str], str]:
        return str if self.names == OWN else entry_points.load(NAMES_GROUP, FunctionType)[self.names]

    def renamed(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics under the configured names."""
        return {self._renaming(name): value for name, value in values.items()}


class ProjectConfig(TrackerConfig):
    """Settings of trackers that organize runs in projects."""

    project: str = "tinsmith"
    """Project (W&B, Trackio) or experiment (MLflow) of the run."""
    group: str = ""
    """Group of runs to compare with each other. Empty: none."""
    name: str = ""
    """Name of the run in the tracker. Empty: the run's name."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    rollouts: int = Field(default=0, ge=0)
    """Number of rollouts of each step and each evaluation to send as a table, the first ones; 0: they stay in the run
    folder."""


class TensorboardConfig(TrackerConfig):
    """TensorBoard event files in the run folder."""

    type: Literal["tensorboard"] = "tensorboard"
    folder: str = ""
    """Folder of the event files. Empty: `tensorboard` in the run folder."""


class WandbConfig(ProjectConfig):
    """Weights & Biases."""

    type: Literal["wandb"] = "wandb"
    mode: Literal["", "online", "offline", "disabled"] = ""
    """`online` needs an API key; `offline` writes to the run folder for a later `wandb sync`. Empty: the environment
    variable WANDB_MODE, else online if there is an API key and the server responds, offline if not."""
    entity: str = ""
    """User or team. Empty: the default of the API key."""
    base_url: str = ""
    """Address of a W&B server. Empty: the environment variable WANDB_BASE_URL, else the public server."""


class MlflowConfig(ProjectConfig):
    """MLflow: a tracking server, a database or a folder."""

    type: Literal["mlflow"] = "mlflow"
    uri: str = ""
    """Tracking URI: http://host:5000, sqlite:///mlflow.db or a folder. Empty: the environment variable
    MLFLOW_TRACKING_URI, else mlflow.db next to the run folder. Credentials come from MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD."""


class Tracker(Monitor):
    """Base class of trackers: it renames the metrics, and sends rollouts if it is to."""

    def __init__(self, config: TrackerConfig) -> None:
        self._config = config

    @override
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, self._config.renamed(values))

    @override
    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        if isinstance(self._config, ProjectConfig) and self._config.rollouts:
            self._log_rollouts(step, kind, rollout_rows(step, kind, groups, self._config.rollouts))

    def _log_rollouts(self, step: int, kind: Kind, rows: Sequence[Sequence[Any]]) -> None:
        """Send the rows of a table of rollouts."""

    @abstractmethod
    def _log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the renamed metrics of a step."""


DIAGNOSIS = "diagnosis"
"""Name of the diagnosis in a tracker."""


class TensorboardMonitor(Tracker):
    """Appends to the event files. Events after the step from which a run resumes are hidden."""

    def __init__(self, config: TensorboardConfig, info: RunInfo) -> None:
        """Raise ConfigError if TensorBoard is not installed."""
        super().__init__(config)
        tensorboard = import_package("torch.utils.tensorboard.writer", package="tensorboard", extra="tensorboard")
        folder = config.folder or str(Layout(info.folder).tensorboard)
        self._writer = tensorboard.SummaryWriter(folder, purge_step=info.start + 1 if info.start else None)

    @override
    def diagnosis(self, step: int, diagnosis: Diagnosis) -> None:
        self._writer.add_text(DIAGNOSIS, diagnosis.text.replace("\n", "\n\n"), step)

    @override
    def close(self) -> None:
        self._writer.close()

    @override
    def _log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class WandbMonitor(Tracker):
    """Creates a run in Weights & Biases, or continues the one in trackers.json."""

    def __init__(self, config: WandbConfig, info: RunInfo) -> None:
        """Raise ConfigError if wandb is not installed, and wandb's own error if it cannot start."""
        super().__init__(config)
        wandb = import_package("wandb", package="wandb", extra="wandb")
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
            id=stored_run_id(info, "wandb", lambda: secrets.token_hex(8)),
            resume="allow",
            config=dict(info.settings),
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")
        self._make_table = wandb.Table

    @override
    def _log_rollouts(self, step: int, kind: Kind, rows: Sequence[Sequence[Any]]) -> None:
        table = self._make_table(columns=list(COLUMNS), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({"step": step, f"rollouts/{kind}": table})

    @override
    def diagnosis(self, step: int, diagnosis: Diagnosis) -> None:
        """Write the text, and the number of updates, to the summary of the run."""
        self._run.summary.update({DIAGNOSIS: diagnosis.text, "updates": diagnosis.updates})

    @override
    def close(self) -> None:
        """Wait until everything is written or sent."""
        self._run.finish()

    @override
    def _log(self, step: int, values: Mapping[str, float]) -> None:
        """Training and evaluation of a step are two rows; charts join them by `step`."""
        self._run.log({"step": step, **values})


class MlflowMonitor(Tracker):
    """Creates a run in MLflow, or continues the one in trackers.json."""

    def __init__(self, config: MlflowConfig, info: RunInfo) -> None:
        """Raise ConfigError if MLflow is not installed, and MLflow's own error if the store cannot be opened."""
        super().__init__(config)
        mlflow = import_package("mlflow", package="mlflow-skinny", extra="mlflow")
        default = f"sqlite:///{info.folder.resolve().parent / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(
            tracking_uri=config.uri or os.environ.get("MLFLOW_TRACKING_URI", "") or default
        )
        self._run_id = stored_run_id(info, "mlflow", lambda: self._create_run(config, info))
        self._client.update_run(self._run_id, status="RUNNING")
        self._sending: Any = None

    @override
    def _log_rollouts(self, step: int, kind: Kind, rows: Sequence[Sequence[Any]]) -> None:
        """Store the table as MLflow stores its own, and list it in the tag by which its pages show tables."""
        file = f"rollouts/{kind}-{step:06}.json"
        self._client.log_dict(self._run_id, {"columns": list(COLUMNS), "data": [list(row) for row in rows]}, file)
        tables = json.loads(self._client.get_run(self._run_id).data.tags.get(_MLFLOW_TABLES, "[]"))
        tables = [table for table in tables if table["path"] != file][-_MLFLOW_SHOWN_TABLES + 1 :]
        text = json.dumps([*tables, {"path": file, "type": "table"}])
        self._client.set_tag(self._run_id, _MLFLOW_TABLES, text)

    @override
    def diagnosis(self, step: int, diagnosis: Diagnosis) -> None:
        """Set the text as a tag of the run, which its page shows."""
        self._client.set_tag(self._run_id, DIAGNOSIS, diagnosis.text[:_MLFLOW_TAG_LENGTH])

    @override
    def close(self) -> None:
        """Wait until everything is sent."""
        try:
            self._wait()
        finally:
            self._client.set_terminated(self._run_id)

    @override
    def _log(self, step: int, values: Mapping[str, float]) -> None:
        """Send all metrics in one request. MLflow does not allow `@` in names; it becomes `_at_`.

        Waits for the request before: MLflow's threads would create the same folders, and one of them would fail.
        """
        from mlflow.entities import Metric

        self._wait()
        now = int(time.time() * 1000)
        entries = [Metric(name.replace("@", "_at_"), value, now, step) for name, value in values.items()]
        self._sending = self._client.log_batch(self._run_id, metrics=entries, synchronous=False)

    def _wait(self) -> None:
        if self._sending is not None:
            self._sending.wait()

    def _create_run(self, config: MlflowConfig, info: RunInfo) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(config.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(config.project)
        tags = dict.fromkeys(config.tags, "")
        if config.group:
            tags["group"] = config.group
        run_id = self._client.create_run(experiment_id, run_name=config.name or info.name, tags=tags).info.run_id
        settings = {key: str(value) for key, value in flatten(info.settings).items() if value not in (None, "")}
        params = [Param(key, value[:_MLFLOW_PARAM_LENGTH]) for key, value in settings.items()]
        for begin in range(0, len(params), _MLFLOW_BATCH):
            self._client.log_batch(run_id, params=params[begin : begin + _MLFLOW_BATCH])
        return run_id


def import_package(module: str, *, package: str, extra: str) -> Any:
    """Import a tracker's package. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_package(package, extra) from error


def missing_package(package: str, extra: str) -> ConfigError:
    """The error for a tracker whose package is not installed; `extra` is the extra of Tinsmith that installs it."""
    return ConfigError(f"monitors: {extra} needs the package {package}.", f"pip install 'tinsmith[{extra}]'")


def stored_run_id(info: RunInfo, tracker: str, create: Callable[[], str]) -> str:
    """Return the run's id in `tracker` from trackers.json; create and store it if there is none."""
    file = Layout(info.folder).trackers
    ids: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    if tracker not in ids:
        ids[tracker] = create()
        atomic_write(file, json.dumps(ids).encode() + b"\n")
    return ids[tracker]
