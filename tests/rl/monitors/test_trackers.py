"""Trackers record every metric of metrics.jsonl; a resumed run continues the tracker's run."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator

import pytest

from tests.rl.scripted_run import rows, run, settings
from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.monitors.trinity_names import TRINITY, trinity_name
from tinsmith.settings import build

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
    """(run id, row) of every row that wandb wrote."""
    from wandb.proto import wandb_internal_pb2

    entries = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
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


def test_missing_tracker_package_is_an_error_with_a_fix(tmp_path, monkeypatch):
    for package, monitor, extra in (
        ("torch.utils.tensorboard.writer", "tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
        ("mlflow", "mlflow", "mlflow"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=f"monitors: {monitor} needs the package") as caught:
            run(tracked(tmp_path / monitor, {"type": monitor}))
        assert caught.value.hint == f"pip install 'tinsmith[{extra}]'"


@pytest.mark.parametrize(
    ("monitor", "instead"),
    [
        ("swanlab", "use tensorboard, mlflow, or wandb"),
        ("clearml", "use tensorboard, mlflow, or wandb"),
        ("trackio", "use tensorboard, mlflow, or wandb"),
        ("file", "always has metrics.jsonl and rollouts/; leave it out"),
        ("ui", "use report"),
    ],
)
def test_monitors_of_other_systems_are_rejected(monitor, instead):
    with pytest.raises(ConfigError, match=rf"{monitor} is not supported: .*{instead}"):
        build(RunConfig, {"monitors": [{"type": monitor}]}, "run.yaml")


def test_trinity_names_are_unique_and_of_existing_metrics(finished):
    names = {name for row in rows(finished, timeless=False) for name in row}
    names |= {"reward/kl", "reward/kl_coef", "optim/kl", "optim/kl_coef"}  # with a divergence
    names |= {"critic/explained_variance", "critic/value_mean", "critic/return_mean"}  # with a critic
    assert set(TRINITY) <= names
    assert len(set(TRINITY.values())) == len(TRINITY)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("reward/format", "rollout/format/mean"),
        ("reward/std", "reward/std"),
        ("eval/pass@1", "eval/eval/accuracy/mean"),
        ("eval/gsm8k/pass@1", "eval/gsm8k/accuracy/mean"),
        ("eval/gsm8k/reward/mean", "eval/gsm8k/reward/mean"),
        ("eval/reward/mean", "eval/eval/reward/mean"),
        ("eval/pass@4", "eval/pass@4"),
        ("time/eval", "time/eval"),
    ],
)
def test_trinity_name_of_metric_families(ours, theirs):
    assert trinity_name(ours) == theirs
