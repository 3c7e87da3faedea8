"""Runs from Python, and runs that start a service of their own: what they refuse before it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.runner import check_checkpoints, server, train

STATE, SAMPLER = "tinker://abc:train:0/weights/step-000003", "tinker://abc:train:0/sampler_weights/final"


def settings(folder: Path, **values: object) -> RunConfig:
    base: dict[str, object] = {"model": {"name": "tiny"}, "tasks": {"train": {"type": "addition"}}, "steps": 4}
    rewards = {"rewards": [{"type": "closeness"}]}
    return RunConfig.model_validate({**base, **rewards, "folder": str(folder / "branch"), **values})


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    (tmp_path / "first" / "service" / "checkpoints").mkdir(parents=True)
    file = tmp_path / "first" / "checkpoints" / "step-000003.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"step": 3, "path": STATE}))
    return file


def test_state_file_of_another_service_is_refused(tmp_path, state_file):
    run = settings(tmp_path, resume_from=str(state_file))
    with pytest.raises(ConfigError, match="is a checkpoint of the service that the run in") as caught, server(run):
        pass
    assert f"tinsmith serve --data {tmp_path / 'first' / 'service'} --model tiny;" in caught.value.hint
    assert not (tmp_path / "branch").exists()


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("resume_from", {"resume_from": STATE}),
        ("model.load_from", {"model": {"name": "tiny", "load_from": STATE}}),
        ("algorithm.teacher", {"algorithm": {"type": "on_policy_distill", "teacher": SAMPLER}}),
        ("rewards.0.model", {"rewards": [{"type": "judge", "model": SAMPLER}]}),
        ("bench.checkpoints.0", {"mode": "bench", "bench": {"checkpoints": [SAMPLER]}}),
    ],
)
def test_checkpoint_of_a_server_is_refused(tmp_path, key, values):
    with pytest.raises(ConfigError, match=rf"^{key}: tinker://.* without any"):
        check_checkpoints(settings(tmp_path, **values))


def test_checkpoints_that_may_exist_are_accepted(tmp_path, state_file, monkeypatch):
    judge = {"type": "judge", "model": SAMPLER, "base_url": "http://127.0.0.1:1/v1"}
    check_checkpoints(settings(tmp_path, rewards=[judge]))
    run = settings(tmp_path, resume_from=str(state_file))
    (tmp_path / "branch" / "service").mkdir(parents=True)  # the run has begun
    check_checkpoints(run)
    (tmp_path / "branch" / "service").rmdir()
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    check_checkpoints(run)


@pytest.mark.parametrize(
    ("run", "keywords", "error"),
    [
        ((), {}, "Nothing says what to train. Name a run file"),
        (("run.yaml",), {"steps": 20}, r'Keywords, such as steps, .* by overrides, such as "steps=20"'),
        ((), {"model": "tiny/model"}, r"arguments: 'model' takes keys with values, such as \{name: tiny/model\}"),
        ((), {"reward_funcs": [len]}, "arguments: there is no key 'reward_funcs'.*here: rewards"),
        (("steps=20",), {}, "There is no file steps=20"),
    ],
)
def test_train_refuses_arguments_that_are_no_run(run, keywords, error):
    with pytest.raises(ConfigError, match=error):
        train(*run, **keywords)


def test_keywords_are_the_settings_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("tinsmith.runner.train_config", lambda config, _: config)

    def short(task, rollout):
        return 1.0

    run = settings(tmp_path, rewards=[short])
    values = {"model": {"name": "tiny"}, "tasks": {"train": {"type": "addition"}}, "steps": 4, "rewards": [short]}
    assert train(**values, folder=str(tmp_path / "branch")) == run.model_copy(update={"name": "run"})


@pytest.mark.parametrize(
    ("key", "values", "path"),
    [
        ("rewards.0.model", {"rewards": [{"type": "implicit_reward", "model": "FOLDER"}]}, SAMPLER),
        ("rewards.0.model", {"rewards": [{"type": "reward_model", "model": "FOLDER"}]}, SAMPLER),
        (
            "rewards.0.reference",
            {"rewards": [{"type": "implicit_reward", "model": SAMPLER, "reference": "FOLDER"}]},
            SAMPLER,
        ),
        ("algorithm.teacher", {"algorithm": {"type": "on_policy_distill", "teacher": "FOLDER"}}, SAMPLER),
        ("model.load_from", {"model": {"name": "tiny", "load_from": "FOLDER"}}, STATE),
    ],
)
def test_run_folder_in_place_of_a_checkpoint_is_refused(tmp_path, monkeypatch, key, values, path):
    folder = tmp_path / "first"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.yaml").write_text("name: first")
    state = {"step": 3, "path": STATE, "sampling_path": SAMPLER}
    (folder / "checkpoints" / "step-000003.json").write_text(json.dumps(state))
    (folder / "state.json").write_text(json.dumps(state))
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    named = json.loads(json.dumps(values).replace("FOLDER", str(folder)))
    with (
        pytest.raises(ConfigError, match=f"^{key}: {folder} is the folder of a run") as error,
        server(settings(tmp_path, **named)),
    ):
        pass
    assert error.value.hint == f"Write {path}."


def test_runner_is_imported_without_sdk_and_torch():
    """A run starts its service before it imports them: seconds, in which the service loads its model."""
    names = "import sys, tinsmith.runner, tinsmith.rl.demo; print({'tinker', 'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
