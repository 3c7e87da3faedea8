"""The configuration object of a script: defaults, values, overrides, and keys that stand at several places."""

from __future__ import annotations

import time
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tinsmith.errors import ConfigError
from tinsmith.integrations.rllm.files import read_config, translate, workflow_args

DOCUMENTED = [
    "model.name=Qwen/Qwen3-8B",
    "model.lora_rank=16",
    "training.group_size=8",
    "data.train_batch_size=32",
    "trainer.total_epochs=20",
    "trainer.logger=[console,wandb]",
    "trainer.project_name=solver-judge-tinker",
    "trainer.experiment_name=countdown-grpo-qwen3-8b",
]
"""rLLM's documented command line as a shell passes it."""


def test_documented_command_line_is_read():
    config = read_config({}, DOCUMENTED, "tinker_rl_trainer")
    assert (config.model.name, config.model.lora_rank, config.training.group_size) == ("Qwen/Qwen3-8B", 16, 8)
    assert list(config.trainer.logger) == ["console", "wandb"]
    assert config.data.train_files is None
    assert config.training.learning_rate == 2e-5


def test_struct_is_closed_as_in_hydra():
    config = read_config()
    with pytest.raises(OmegaConfBaseException):
        _ = config.training.group_sizes
    assert config.get("rllm") is None
    assert read_config(name="unified").rllm.get("backend", "verl") == "tinker"


def test_values_come_before_overrides():
    config = read_config({"training": {"group_size": 4, "beta1": 0.8}}, ["training.group_size=6"])
    assert (config.training.group_size, config.training.beta1, config.training.beta2) == (6, 0.8, 0.95)


def test_rllm_keys_mean_the_unified_configuration():
    assert "rllm" in read_config({}, ["rllm.trainer.total_batches=5"])
    assert "rllm" in read_config({}, ["rllm/backend=tinker"])
    assert "rllm" in read_config({"defaults": ["unified", "_self_"]})
    assert "rllm" not in read_config({}, DOCUMENTED)


@pytest.mark.parametrize(
    ("values", "overrides", "expected"),
    [
        ({}, [], 2048),
        ({}, ["data.max_prompt_length=7"], 7),
        ({}, ["data.max_prompt_length=7", "rllm.data.max_prompt_length=8"], 8),
        ({"data": 3}, [], 3),
        ({"rllm": 4, "data": 3}, [], 4),
        ({"rllm": 4}, ["data.max_prompt_length=7"], 7),
    ],
)
def test_mirrored_keys_have_one_value(values: dict[str, int], overrides: list[str], expected: int):
    file: dict[str, Any] = {"rllm": {}}
    if "data" in values:
        file["data"] = {"max_prompt_length": values["data"]}
    if "rllm" in values:
        file["rllm"] = {"data": {"max_prompt_length": values["rllm"]}}
    config = read_config(file, overrides)
    assert (config.data.max_prompt_length, config.rllm.data.max_prompt_length) == (expected, expected)
    assert translate(config).settings["sampling"]["max_prompt_tokens"] == expected


def test_group_sizes_of_both_places_are_one():
    config = read_config({}, ["rllm/backend=tinker", "training.group_size=5", "validation.group_size=2"])
    assert (config.rllm.rollout.n, config.rllm.rollout.n_val) == (5, 2)
    run = translate(config).settings
    assert (run["group_size"], run["eval"]["num_samples"]) == (5, 2)


def test_unknown_key_is_refused_and_plus_adds_one():
    with pytest.raises(ConfigError, match=r"Did you mean 'training\.group_size'"):
        read_config({}, ["training.group_sise=4"])
    with pytest.raises(ConfigError, match=r"is added with \+mine\.key=VALUE"):
        read_config({}, ["mine.key=4"])
    config = read_config({}, ["+mine.key=4"])
    assert config.mine.key == 4
    assert "mine: no key of rLLM; only the script itself reads it." in translate(config).notes


def test_misspelt_section_is_a_fault():
    assert "Did you mean 'trainer'?" in translate(read_config({}, ["+trainers.total_epochs=4"])).faults[0]


def test_removed_key_has_its_default():
    config = read_config({}, ["~trainer.logger"])
    assert "logger" not in config.trainer
    assert translate(config).settings["monitors"] == [{"type": "console"}, {"type": "report"}]
    with pytest.raises(ConfigError, match="there is no key"):
        read_config({}, ["~trainer.loggers"])


def test_references_are_resolved(monkeypatch):
    monkeypatch.setenv("PLACE", "out")
    overrides = ["trainer.experiment_name=a", "trainer.default_local_dir=${oc.env:PLACE}/${trainer.experiment_name}"]
    assert translate(read_config({}, overrides)).settings["folder"] == "out/a"
    config = read_config({}, ["rllm.data.max_response_length=99"])
    assert config.rllm.rollout.val.max_tokens == 99


def test_reference_to_the_time_is_replaced():
    name = read_config({}, ["trainer.experiment_name=run-${now:%Y}"]).trainer.experiment_name
    assert name in (f"run-{time.localtime().tm_year}", f"run-{time.localtime().tm_year + 1}")


def test_value_that_a_script_sets_is_translated():
    config = read_config({}, DOCUMENTED)
    OmegaConf.update(config, "training.learning_rate", 4e-5)
    assert translate(config).settings["optimizer"]["learning_rate"] == 4e-5


def test_arguments_of_the_workflow_are_those_that_are_set():
    overrides = ["rllm.workflow.workflow_args.gamma=0.9", "rllm.workflow.workflow_args.timeout=5"]
    assert workflow_args(read_config({}, overrides)) == {"gamma": 0.9}
    assert workflow_args(read_config({}, DOCUMENTED)) == {}


def test_unknown_configuration_is_refused():
    with pytest.raises(ConfigError, match="Known here: tinker_rl_trainer, unified"):
        read_config(name="agent_ppo_trainer")
    with pytest.raises(ConfigError, match="'other' is not read"):
        read_config({"defaults": ["other"]})
