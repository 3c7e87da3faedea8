"""Overrides of a foreign file: its own keys are set before the translation, RunConfig's keys after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trinity.files import SMALL, TINKER, with_key, write
from tinsmith.cli import main
from tinsmith.dialects import RunFile, read_run
from tinsmith.dialects.base import has_key
from tinsmith.errors import ConfigError
from tinsmith.integrations.trinity.files.schema import TrinityFile
from tinsmith.rl.config import RunConfig
from tinsmith.settings import paths


def read(folder: Path, *overrides: str) -> RunFile:
    return read_run(write(folder, SMALL), overrides)


def test_overrides_of_trinity_keys_are_translated(tmp_path: Path):
    settings = read(tmp_path, "buffer.batch_size=2", "trainer.total_steps=1", "model.tinker.rank=8").settings
    assert (settings.groups_per_step, settings.steps, settings.model.rank) == (2, 1, 8)


def test_overrides_of_both_kinds_can_be_combined(tmp_path: Path):
    settings = read(tmp_path, "groups_per_step=3", "buffer.batch_size=2", "sampling.max_tokens=5").settings
    assert (settings.groups_per_step, settings.sampling.max_tokens) == (3, 5)


def test_overrides_reach_lists_mappings_and_arguments(tmp_path: Path):
    overrides = (
        "buffer.explorer_input.taskset={}", "buffer.explorer_input.taskset.path=rows.jsonl",
        "algorithm.advantage_fn_args.std_threshold=0.25", "explorer.auxiliary_models=[{model_path: a}]",
        "explorer.auxiliary_models[0].model_path=judge", "algorithm.algorithm_type=on_policy_distill",
        "algorithm.advantage_fn_args={kl_coef: 0.5}",
    )  # fmt: skip
    settings = read(tmp_path, *overrides[1:2], *overrides[3:]).settings
    assert settings.tasks.sources[0].model_dump()["path"] == "rows.jsonl"
    assert settings.algorithm.teacher == "judge"
    assert read(tmp_path, overrides[2]).settings.algorithm.advantage.model_dump()["std_threshold"] == 0.25


@pytest.mark.parametrize(
    ("override", "check"),
    [
        ("model.lora_configs=[{lora_rank: 16}]", lambda run: run.model.rank == 8),
        ("buffer.explorer_input.eval_tasksets=[]", lambda run: not run.tasks.evaluates),
        ("algorithm.optimizer={lr: 1e-5}", lambda run: run.optimizer.learning_rate == 1e-5),
        ("model.tinker={enable: true, rank: 4}", lambda run: run.model.rank == 4),
        ("buffer.explorer_input.taskset={path: a.jsonl}", lambda run: run.tasks.sources[0].path == "a.jsonl"),
        (
            "buffer.explorer_input={tasksets: [{path: a.jsonl, default_workflow_type: math_workflow}]}",
            lambda run: run.tasks.sources[0].path == "a.jsonl",
        ),
        ("buffer.explorer_input.eval_tasksets[0].path=a.jsonl", lambda run: run.tasks.evaluates),
        ("buffer.explorer_input.taskset.format.system_prompt=Q: {x} A: ", lambda run: True),
        ("group=007", lambda run: run.folder == "out/Trinity-RFT/007/small"),
        ("name=@x", lambda run: run.name == "@x"),
    ],
)
def test_lists_and_sections_of_trinity_are_set_whole(tmp_path: Path, override: str, check: Callable[[Any], bool]):
    file = write(tmp_path, with_key(SMALL, "model.tinker.rank", 8))
    assert check(read_run(file, ["buffer.explorer_input.taskset.path=rows.jsonl", override]).settings)


def test_mode_and_name_are_trinity_keys(tmp_path: Path):
    settings = read(tmp_path, "mode=explore", "name=other").settings
    assert (settings.mode, settings.buffer.type, settings.folder) == ("explore", "file", "out/Trinity-RFT/other")


def test_overrides_reach_into_stages(tmp_path: Path):
    file = write(tmp_path, with_key(SMALL, "stages", [{"stage_name": "one"}, {"stage_name": "two"}]))
    own = read_run(file, ["stages.0.steps=1"]).settings
    assert [own.stage_config(number).steps for number in (1, 2)] == [1, 3]
    assert read_run(file, ["stages.1.stage_name=three"]).settings.stages[1].name == "three"
    foreign = read_run(file, ["stages.1.algorithm.algorithm_type=rloo"]).settings
    assert [foreign.stage_config(number).algorithm.type for number in (1, 2)] == ["grpo_std", "rloo"]


def test_stages_of_a_run_file_replace_those_of_trinity(tmp_path: Path):
    """Break `_has_own_stages`: return False."""
    stages = read(tmp_path, 'stages=[{"name": "first", "steps": 2}, {"name": "then"}]').settings.stages
    assert [stage.name for stage in stages] == ["first", "then"]


def test_overrides_replace_referenced_values():
    assert read_run(TINKER, ["name=other", "buffer.batch_size=8"]).settings.groups_per_step == 8


@pytest.mark.parametrize(
    ("override", "key", "suggestion"),
    [
        ("buffer.batch_sizes=2", "buffer.batch_sizes", "buffer.batch_size"),
        ("trainer.total_step=2", "trainer.total_step", "trainer.total_steps"),
        ("trainr.total_steps=2", "trainr.total_steps", "trainer.total_steps"),
        ("group_sizes=2", "group_sizes", "group_size"),
        ("model.rnk=2", "model.rnk", "model.rank"),
        ("model.model_pth=x", "model.model_pth", "model.model_path"),
    ],
)
def test_unknown_override_suggests_the_nearest_key(tmp_path: Path, override: str, key: str, suggestion: str):
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, override)
    assert f"the command line: there is no key '{key}'. Did you mean '{suggestion}'?" in str(refusal.value)


def test_invalid_value_is_reported_at_the_command_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"the command line: .buffer\.batch_size."):
        read(tmp_path, "buffer.batch_size=many")


def test_shared_keys_are_only_those_documented():
    shared = {key for key in paths(RunConfig) if has_key(TrinityFile, key.split("."))}
    stages = {key for key in shared if key.startswith("stages.")}
    assert shared == {"mode", "name", "stages", *stages, "model", "algorithm", "buffer", "service"}


@pytest.mark.parametrize("command", [("check",), ("config", "show"), ("config", "convert")])
def test_commands_accept_trinity_keys(command: tuple[str, ...], tmp_path: Path, capsys, monkeypatch):
    file = write(tmp_path, SMALL)
    monkeypatch.setattr("sys.argv", ["tinsmith", *command, "--config", str(file), "buffer.total_steps=77"])
    with pytest.raises(SystemExit):
        main()
    assert "77" in capsys.readouterr().out
