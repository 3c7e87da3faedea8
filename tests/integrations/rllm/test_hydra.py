"""`hydra.main` of scripts: rLLM's configurations by name, configurations of one's own, options and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig

from tests.integrations.rllm.files.test_config import DOCUMENTED
from tests.integrations.rllm.flows import TwoSolvers
from tinsmith.errors import ConfigError
from tinsmith.rllm import AgentTrainer, hydra

PACKAGE = "pkg://rllm.trainer.config"


def start(monkeypatch: pytest.MonkeyPatch, *words: str, **options: Any) -> DictConfig | None:
    """The configuration that a script receives."""
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    received: list[DictConfig] = []

    @hydra.main(**{"config_path": PACKAGE, "config_name": "tinker_rl_trainer", "version_base": None, **options})
    def main(config: DictConfig) -> None:
        received.append(config)

    main()
    return received[0] if received else None


def test_command_line_overrides_the_configuration(monkeypatch: pytest.MonkeyPatch, capsys):
    config = start(monkeypatch, "model.lora_rank=16", "trainer.logger=[console,wandb]", "hydra.run.dir=out")
    assert capsys.readouterr().err == "note: hydra.run.dir=out: Hydra's own settings have no effect\n"
    assert config is not None
    assert (config.model.lora_rank, list(config.trainer.logger)) == (16, ["console", "wandb"])
    assert "hydra" not in config


def test_unified_configuration_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch):
    config = start(monkeypatch, "rllm/backend=tinker", config_name="unified")
    assert config is not None
    assert config.rllm.trainer.total_epochs == 10
    config = start(monkeypatch, "--config-name", "unified", "training.group_size=3")
    assert config is not None
    assert config.rllm.rollout.n == 3


def test_configuration_of_ones_own_names_its_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    values = {"defaults": ["unified", "_self_"], "rllm": {"trainer": {"test_freq": 7}}, "mine": {"key": 1}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    config = start(monkeypatch, "mine.key=2", config_path=str(tmp_path), config_name="mine")
    assert config is not None
    assert (config.rllm.trainer.test_freq, config.rllm.trainer.save_freq, config.mine.key) == (7, 20, 2)


def test_configuration_is_passed_through():
    @hydra.main(config_path=PACKAGE, config_name="tinker_rl_trainer")
    def main(config: DictConfig) -> int:
        return config.training.group_size

    assert main(hydra.compose("tinker_rl_trainer", ["training.group_size=5"])) == 5


def test_documented_command_line_makes_a_run():
    config = hydra.compose("tinker_rl_trainer", DOCUMENTED)
    rows = [{"question": "Which?", "right": "yes"}]
    run = AgentTrainer(config=config, workflow_class=TwoSolvers, train_dataset=rows, val_dataset=rows).run_config
    assert (run.model.rank, run.group_size, run.groups_per_step, run.epochs) == (16, 8, 32, 20)
    assert [monitor.type for monitor in run.monitors] == ["console", "report", "wandb"]
    assert (run.sampling.temperature, run.sampling.top_p, run.algorithm.old_logprobs) == (0.6, 0.95, "recomputed")
    assert (run.eval.every, run.eval.before, run.tasks.evaluates) == (5, True, True)


def test_configuration_is_printed(monkeypatch: pytest.MonkeyPatch, capsys):
    assert start(monkeypatch, "--cfg", "job", "training.group_size=5") is None
    assert yaml.safe_load(capsys.readouterr().out)["training"]["group_size"] == 5


@pytest.mark.parametrize(
    ("words", "options", "text"),
    [
        (["training.group_sizes=5"], {}, "Did you mean 'training.group_size'?"),
        (["--multirun", "training.group_size=5"], {}, "--multirun is not supported"),
        ([], {"config_name": None}, "hydra.main has no config_name"),
        ([], {"config_name": "other"}, "There is no configuration 'other' of rLLM here."),
        ([], {"config_path": "pkg://mine"}, "The configurations of pkg://mine cannot be read."),
    ],
)
def test_error_ends_the_script_with_its_message(
    words: list[str], options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as end:
        start(monkeypatch, *words, **options)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_full_error_is_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError):
        start(monkeypatch, "training.group_sizes=5")
