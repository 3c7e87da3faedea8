"""Trackers record every metric of metrics.jsonl; a resumed run continues the tracker's run."""

from __future__ import annotations

import asyncio
import io
import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from rich.console import Console

from tests.rl.scripted_run import rows, run, settings
from tests.service.support.databases import free_port
from tinsmith.cli import check
from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.record import monitors
from tinsmith.rl.stages import run_stages
from tinsmith.settings import build

pytestmark = pytest.mark.e2e

SHORT = {"steps": 3, "eval": {"every": 0}}
NOT_OURS = pytest.mark.filterwarnings(  # warnings of these packages, not of Tinsmith
    "ignore::DeprecationWarning",
    "ignore::PendingDeprecationWarning",
    "ignore::FutureWarning",
    "ignore::ResourceWarning",
)


def tracked(tmp_path, monitor, **changes) -> RunConfig:
    """Settings of a short run with one monitor."""
    return settings(tmp_path / "run", **{**SHORT, "monitors": [monitor], **changes})


def curve(tmp_path, name) -> dict[int, float]:
    """Values of a metric by step, from metrics.jsonl."""
    return {row["step"]: row[name] for row in rows(tmp_path / "run") if name in row}


@NOT_OURS
def test_tensorboard_has_every_metric_after_resuming(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tracked(tmp_path, {"type": "tensorboard"}))
    run(tracked(tmp_path, {"type": "tensorboard"}, steps=5))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in ("reward/mean", "eval/pass@1", "optim/lr"):
        values = {event.step: event.value for event in events.Scalars(name)}
        assert values == pytest.approx(curve(tmp_path, name))
    assert set(curve(tmp_path, "reward/mean")) == {1, 2, 3, 4, 5}


def records(content: bytes) -> Iterator[bytes]:
    """Records of a wandb file, a LevelDB log: blocks of 32 KiB with fragments of (crc, length, kind, data)."""
    at, begun = 7, b""
    while at + 7 < len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        begun += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full record, or its last fragment
            yield begun
            begun = b""


def logged(folder) -> list[tuple[str, dict[str, float]]]:
    """(run id, row) of every row that wandb wrote. Checks project, group and name of each run."""
    from wandb.proto import wandb_internal_pb2

    entries = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                assert (record.run.project, record.run.run_group, record.run.display_name) == ("p", "g", "small")
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                entries.append((file.stem, row))
    return entries


@NOT_OURS
def test_offline_wandb_has_every_metric_under_one_run_id(tmp_path):
    monitor = {"type": "wandb", "mode": "offline", "project": "p", "group": "g", "tags": ["small"]}
    run(tracked(tmp_path, monitor))
    time.sleep(1.1)  # wandb names the files of a process by the second
    run(tracked(tmp_path, monitor, steps=5))
    for _ in range(100):  # wandb writes in a process of its own
        entries = logged(tmp_path / "run")
        if len(entries) == len(rows(tmp_path / "run")):
            break
        time.sleep(0.1)
    assert len({name for name, _ in entries}) == 1
    reward = {row["step"]: row["reward/mean"] for _, row in entries if "reward/mean" in row}
    assert reward == pytest.approx(curve(tmp_path, "reward/mean"))
    assert set(reward) == {1, 2, 3, 4, 5}


@NOT_OURS
@pytest.mark.parametrize("store", ["folder", pytest.param("sqlite", marks=pytest.mark.slow)])
def test_mlflow_has_every_metric_in_one_run(tmp_path, monkeypatch, store):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = str(tmp_path / "store") if store == "folder" else ""
    monitor = {"type": "mlflow", "uri": uri, "project": "p", "group": "g", "tags": ["small"], "names": "trinity"}
    run(tracked(tmp_path, monitor))
    run(tracked(tmp_path, monitor, steps=5))
    client = MlflowClient(tracking_uri=uri or f"sqlite:///{tmp_path / 'mlflow.db'}")
    project = client.get_experiment_by_name("p")
    (tracked_run,) = client.search_runs([project.experiment_id])
    assert tracked_run.info.status == "FINISHED"
    assert tracked_run.data.params["model.name"] == "scripted"
    assert tracked_run.data.tags["group"] == "g"
    history = client.get_metric_history(tracked_run.info.run_id, "critic/rewards/mean")
    assert {metric.step: metric.value for metric in history} == pytest.approx(curve(tmp_path, "reward/mean"))
    assert client.get_metric_history(tracked_run.info.run_id, "eval/eval/accuracy/mean")


class _Connected(Exception):
    """The run has come to its model."""


async def never(state, version):
    """A Connect function for runs that must not come to their model."""
    raise _Connected


@pytest.fixture
def logged_out(tmp_path, monkeypatch):
    """A user without an API key of W&B; returns the user's home."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed_before_the_model(tmp_path, monitor) -> str:
    """What a run prints until it connects to its model."""
    console = Console(file=io.StringIO(), width=1000)
    with pytest.raises(_Connected):
        run(tracked(tmp_path, monitor), never, console)
    return console.file.getvalue()


def test_wandb_without_a_key_says_offline_before_the_model_loads(tmp_path, logged_out):
    output = printed_before_the_model(tmp_path, {"type": "wandb"})
    assert "wandb: there is no API key, so the run is recorded offline" in output
    assert f"wandb sync {tmp_path / 'run' / 'wandb'}/offline-run-*" in output


@NOT_OURS
def test_wandb_without_a_key_records_offline(tmp_path, logged_out):
    run(tracked(tmp_path, {"type": "wandb"}, steps=1))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


def test_wandb_online_without_a_key_ends_before_the_model_loads(tmp_path, logged_out, monkeypatch):
    with pytest.raises(ConfigError, match="mode is online, but there is no API key") as caught:
        run(tracked(tmp_path, {"type": "wandb", "mode": "online"}), never)
    assert "wandb login" in caught.value.hint
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match="mode is online, but there is no API key"):
        run(tracked(tmp_path, {"type": "wandb"}), never)


def closed_port() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("place", ["environment", "netrc", "settings"])
def test_wandb_server_that_does_not_respond_is_reported(tmp_path, logged_out, monkeypatch, place):
    server = closed_port()
    if place == "environment":
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    elif place == "netrc":
        (logged_out / ".netrc").write_text(f"machine {server} login user password {'k' * 40}\n")
    else:
        (logged_out / ".config" / "wandb").mkdir(parents=True)
        (logged_out / ".config" / "wandb" / "settings").write_text(f"[default]\napi_key = {'k' * 40}\n")
    output = printed_before_the_model(tmp_path, {"type": "wandb", "base_url": f"http://{server}"})
    assert f"wandb: http://{server} does not respond, so the run is recorded offline" in output


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandb_needs_no_key_in_other_modes(tmp_path, logged_out, monkeypatch, mode):
    assert "wandb" not in printed_before_the_model(tmp_path, {"type": "wandb", "mode": mode})
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text(f"[default]\nmode = {mode}\n")
    assert "wandb" not in printed_before_the_model(tmp_path, {"type": "wandb"})


def test_mlflow_server_that_does_not_respond_ends_the_run(tmp_path, logged_out):
    uri = f"http://{closed_port()}"
    with pytest.raises(ConfigError, match=f"mlflow: no server responds at {uri}"):
        run(tracked(tmp_path, {"type": "mlflow", "uri": uri}), never)


def test_later_stage_with_a_missing_tracker_ends_the_run(tmp_path, logged_out):
    online = [{"type": "wandb", "mode": "online"}]
    stages = [{"name": "one"}, {"name": "two", "monitors": online}]
    with pytest.raises(ConfigError, match="no API key"):
        asyncio.run(run_stages(settings(tmp_path / "run", stages=stages), lambda _stage: never, Console(quiet=True)))


def test_tracker_that_does_not_start_is_one_sentence(tmp_path, monkeypatch):
    def failing(*_args):
        raise RuntimeError("the store is locked\nat line 1")

    monkeypatch.setattr(monitors, "TensorboardMonitor", failing)
    with pytest.raises(ConfigError, match=r"^monitors: tensorboard did not start: the store is locked Correct"):
        run(tracked(tmp_path, {"type": "tensorboard"}))


def test_check_reports_what_monitors_lack(tmp_path, logged_out, capsys):
    file = tmp_path / "run.yaml"
    config = tracked(tmp_path, {"type": "wandb"}).model_dump(mode="json", exclude_unset=True)
    file.write_text(json.dumps(config))
    check.check(str(file))
    shown = capsys.readouterr()
    assert "there is no API key, so the run is recorded offline" in " ".join(shown.err.split())
    assert "is valid" in shown.out
    with pytest.raises(ConfigError, match="no API key"):
        check.check(str(file), "monitors=[{type: wandb, mode: online}]")


def test_missing_tracker_package_is_an_error_with_a_fix(tmp_path, monkeypatch):
    for package, monitor, extra in (
        ("torch.utils.tensorboard.writer", "tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
        ("mlflow", "mlflow", "mlflow"),
        ("trackio", "trackio", "trackio"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=f"monitors: {monitor} needs the package") as caught:
            run(tracked(tmp_path / monitor, {"type": monitor}))
        assert caught.value.hint == f"pip install 'tinsmith[{extra}]'"


@pytest.mark.parametrize(
    ("monitor", "instead"),
    [
        ("swanlab", "use tensorboard, mlflow, trackio, or wandb"),
        ("clearml", "use tensorboard, mlflow, trackio, or wandb"),
        ("file", "always has metrics.jsonl and rollouts/; leave it out"),
        ("ui", "use report"),
    ],
)
def test_monitors_of_other_systems_are_rejected(monitor, instead):
    with pytest.raises(ConfigError, match=rf"{monitor} is not supported: .*{instead}"):
        build(RunConfig, {"monitors": [{"type": monitor}]}, "run.yaml")


def test_metric_names_of_unknown_systems_are_refused():
    with pytest.raises(ConfigError, match=r"no metric names of trinty\. Did you mean 'trinity'\?"):
        build(RunConfig, {"monitors": [{"type": "tensorboard", "names": "trinty"}]}, "run.yaml")


@NOT_OURS
def test_trackers_have_tables_of_rollouts_if_set(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = str(tmp_path / "store")
    trackers = [
        {"type": "mlflow", "uri": uri, "project": "p", "rollouts": 5},
        {"type": "wandb", "mode": "offline", "project": "p", "group": "g", "rollouts": 5},
    ]
    run(settings(tmp_path / "run", steps=2, eval={"every": 0}, monitors=trackers))
    names = sorted(file.stem for file in (tmp_path / "store").rglob("rollouts/*.json"))
    assert names == ["eval-000000", "eval-000002", "train-000001", "train-000002"]
    table = json.loads((tmp_path / "run" / "rollouts" / "train-000002.jsonl").read_text().splitlines()[4])
    (file,) = (tmp_path / "store").rglob("train-000002.json")
    content = json.loads(file.read_text())
    row = dict(zip(content["columns"], content["data"][4], strict=True))
    assert (row["rollout"], row["reply"], row["reward"], row["group"]) == (
        "train-2-4", table["text"], table["reward"], table["group"],
    )  # fmt: skip
    tables = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/rollouts/*.table.json"))
    assert {len(json.loads(file.read_text())["data"]) for file in tables} == {5}
    assert len(tables) == 4


class FakeTrackio(ModuleType):
    """The functions of trackio that the monitor calls: keeps runs by name, and prints as the package does."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = ModuleSpec("trackio", None)  # for find_spec
        self.runs: dict[str, list[tuple[int, dict[str, object]]]] = {}
        self.settings: list[dict[str, object]] = []

    def init(self, *, name: str, **settings: object) -> FakeTrackioRun:
        """Continue the run, or begin it."""
        print("* Created new run")
        self.settings.append(settings)
        return FakeTrackioRun(self.runs.setdefault(name, []))

    def Table(self, columns: list[str], data: list[list[object]]) -> list[dict[str, object]]:
        """Rows by column."""
        return [dict(zip(columns, row, strict=True)) for row in data]


class FakeTrackioRun:
    """A run of FakeTrackio."""

    def __init__(self, rows: list[tuple[int, dict[str, object]]]) -> None:
        self._rows = rows

    def log(self, values: dict[str, object], step: int) -> None:
        """Keep a row."""
        self._rows.append((step, values))

    def finish(self) -> None:
        """End it."""
        print("* Run finished")


def test_trackio_has_every_metric_in_one_run(tmp_path, monkeypatch, capsys):
    trackio = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monitor = {"type": "trackio", "project": "p", "group": "g", "rollouts": 2}
    run(tracked(tmp_path, monitor))
    run(tracked(tmp_path, monitor, steps=5))
    assert "* " not in capsys.readouterr().out
    ((name, logged_rows),) = trackio.runs.items()
    assert name == json.loads((tmp_path / "run" / "trackers.json").read_text())["trackio"]
    assert [(each["project"], each["group"], each["resume"]) for each in trackio.settings] == [("p", "g", "allow")] * 2
    reward = {step: values["reward/mean"] for step, values in logged_rows if "reward/mean" in values}
    assert reward == curve(tmp_path, "reward/mean")
    tables = [(step, values["rollouts/train"]) for step, values in logged_rows if "rollouts/train" in values]
    assert [(step, [row["rollout"] for row in table]) for step, table in tables] == [
        (step, [f"train-{step}-0", f"train-{step}-1"]) for step in range(1, 6)
    ]
    assert any("diagnosis" in values for _, values in logged_rows)


@pytest.mark.parametrize("wrong", [{"tags": ["x"]}, {"server_url": "http://a", "space_id": "me/b"}])
def test_trackio_refuses_what_it_cannot_do(wrong):
    with pytest.raises(ConfigError, match=r"trackio has no tags|name two places"):
        build(RunConfig, {"monitors": [{"type": "trackio", **wrong}]}, "run.yaml")
