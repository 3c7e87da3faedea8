"""Files of rLLM's keys in the commands: recognized, with overrides of both kinds, without evaluation if none is set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integrations.rllm.files.keys import SEED
from tinsmith.cli import main
from tinsmith.dialects import RunFile, find_dialect, read_run
from tinsmith.errors import ConfigError
from tinsmith.integrations.rllm.files.dialect import defaults

SMALL: dict[str, Any] = {
    "model": {"name": "tiny", "lora_rank": 8},
    "training": {"group_size": 4},
    "sampling": {"temperature": 1.0, "top_p": 1.0},
    "data": {"train_batch_size": 2, "max_prompt_length": 64, "max_response_length": 16},
    "trainer": {"total_epochs": 1, "experiment_name": "small"},
    "hydra": {"run": {"dir": "outputs/${now:%Y-%m-%d}"}},
}
TASKS = ("tasks.train.type=addition", "rewards=[{type: number}]")


def write(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "file.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def read(folder: Path, *overrides: str, values: dict[str, Any] = SMALL) -> RunFile:
    return read_run(write(folder, values), overrides)


def test_file_is_a_run_with_tasks_and_rewards(tmp_path: Path):
    run = read(tmp_path, *TASKS)
    settings = run.settings
    assert (run.dialect, run.guide) == ("rLLM", "docs/from/rllm.md")
    assert (settings.model.rank, settings.group_size, settings.groups_per_step, settings.epochs) == (8, 4, 2, 1)
    assert settings.folder == "runs/rllm-tinker/small"
    assert not settings.tasks.evaluates
    assert run.notes == ("hydra.run.dir: the files of a run are in its run folder.",)


def test_evaluation_settings_apply_to_held_out_tasks(tmp_path: Path):
    settings = read(tmp_path, *TASKS, "tasks.eval.type=largest", "training.val_group_size=3").settings
    assert settings.tasks.evaluates
    assert (settings.eval.every, settings.eval.num_samples, settings.eval.temperature) == (5, 3, 1.0)


def test_file_names_its_data(tmp_path: Path):
    row = {"question": "How many?", "ground_truth": "3", "data_source": "some"}
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(yaml.safe_dump(row, default_flow_style=True, width=999).replace("'3'", '"3"'))
        (tmp_path / name).write_text('{"question": "How many?", "ground_truth": "3", "data_source": "some"}\n')
    data = {**SMALL["data"], "train_files": str(tmp_path / "train.jsonl"), "val_files": str(tmp_path / "test.jsonl")}
    settings = read(tmp_path, TASKS[1], values={**SMALL, "data": data}).settings
    (task,) = settings.tasks.sources[0].load()
    assert (task.messages[0].content, task.answer, task.extra) == ("How many?", "3", row)
    assert settings.tasks.held_out == 0
    assert settings.tasks.evaluates


def test_workflow_of_ones_own_is_named_by_its_path(tmp_path: Path):
    path = "workflow.path=examples.solver_judge.solver_judge:SolverJudge"
    arguments = "workflow.args={solutions: 3, reward: {type: closeness}}"
    settings = read(tmp_path, TASKS[0], path, arguments).settings
    assert settings.workflow.model_dump()["args"]["solutions"] == 3
    assert settings.rollout.split == 1
    assert read(tmp_path, *TASKS).settings.rollout.split == 0


def test_overrides_of_both_kinds_can_be_combined(tmp_path: Path):
    settings = read(tmp_path, *TASKS, "training.group_size=6", "+training.beta1=0.8", "steps=9").settings
    assert (settings.group_size, settings.optimizer.beta1, settings.steps) == (6, 0.8, 9)
    settings = read(tmp_path, *TASKS, "trainer.logger=['console','tensorboard']", "~training.group_size").settings
    assert [monitor.type for monitor in settings.monitors] == ["console", "report", "tensorboard"]
    assert settings.group_size == 16


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("training.group_sizes=2", "training.group_size"),
        ("trainer.total_epoch=2", "trainer.total_epochs"),
        ("model.lora_rnk=2", "model.lora_rank"),
        ("group_sizes=2", "group_size"),
    ],
)
def test_unknown_override_suggests_the_nearest_key(tmp_path: Path, override: str, suggestion: str):
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, override)
    assert f"Did you mean '{suggestion}'?" in str(refusal.value)


def test_agent_of_a_script_is_noted(tmp_path: Path):
    notes = read(tmp_path, *TASKS, "agent.max_steps=4").notes
    assert "agent.max_steps: only a script has an agent class with an environment class." in notes


def test_whole_file_of_rllm_is_read(tmp_path: Path):
    file = {**defaults(), "hydra": {"run": {"dir": "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"}}}
    settings = read(tmp_path, *TASKS, values=file).settings
    assert settings.group_size == SEED["training.group_size"]
    assert settings.eval.max_tokens is None


def test_unified_file_is_read(tmp_path: Path):
    file = {
        "defaults": ["unified", {"override rllm/backend": "tinker"}, "_self_"],
        "rllm": {"trainer": {"total_batches": 3}, "data": {"max_response_length": 32}},
        "model": {"name": "tiny"},
        "training": {"group_size": "???"},
    }
    settings = read(tmp_path, *TASKS, "rllm.rollout.n=3", values=file).settings
    assert (settings.steps, settings.group_size, settings.sampling.max_tokens) == (3, 3, 32)
    with pytest.raises(ConfigError, match="'mine' is not read"):
        read(tmp_path, *TASKS, values={**file, "defaults": ["unified", "mine"]})


def test_faults_are_reported_together(tmp_path: Path):
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, "algorithm.adv_estimator=grop", "trainer.logger=clearml")
    assert len(str(refusal.value).splitlines()) >= 2


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"rllm": {}}, "rLLM"),
        ({"training": {"group_size": 2}}, "rLLM"),
        ({"model": {"name": "m", "lora_rank": 2}}, "rLLM"),
        ({"trainer": {"total_epochs": 2}}, "rLLM"),
        ({"data": {"train_batch_size": 2}}, "rLLM"),
        ({"trainer": {"total_steps": 2}}, "Trinity-RFT"),
        ({"model": {"name": "m"}, "sampling": {"temperature": 1.0}, "workflow": {"type": "math"}}, None),
    ],
)
def test_dialect_is_recognized_by_its_keys(values: dict[str, Any], name: str | None):
    dialect = find_dialect(values)
    assert (dialect and dialect.name) == name


def test_check_names_the_guide(tmp_path: Path, capsys, monkeypatch):
    file = write(tmp_path, SMALL)
    monkeypatch.setattr("sys.argv", ["tinsmith", "check", str(file), *TASKS])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    assert not end.value.code
    assert "a file of rLLM, is valid: grpo on tiny, 1 epoch" in printed.out
    assert "docs/from/rllm.md" in printed.err


def test_converted_file_is_the_same_run(tmp_path: Path, capsys, monkeypatch):
    file, out = write(tmp_path, SMALL), tmp_path / "ours.yaml"
    monkeypatch.setattr("sys.argv", ["tinsmith", "config", "convert", str(file), *TASKS, "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert read_run(out).settings.model_dump() == read_run(file, TASKS).settings.model_dump()
