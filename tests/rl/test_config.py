"""The example run files are valid, and every key of a run file is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tinsmith.rl
from tests.rl.scripted_run import settings
from tinsmith.errors import ConfigError
from tinsmith.rl import demo
from tinsmith.rl.algorithms.losses.policy_gradient import PpoLoss
from tinsmith.rl.config import RunConfig
from tinsmith.rl.rollouts.backoff import BackoffConfig
from tinsmith.rl.types import Task
from tinsmith.rl.workflows.conversation import Conversation
from tinsmith.settings import Settings, field_docs, read
from tools.reference.settings import members

ROOT = Path(__file__).parents[2]
FOREIGN = ("tinker.yaml", "verl.yaml")
"""Files of Trinity-RFT, which tinsmith.dialects reads, as it does those of minds_RL, examples/minds/*.toml."""
EXAMPLES = sorted(
    file
    for file in (ROOT / "examples").rglob("*")
    if (file.suffix == ".yaml" and file.name not in FOREIGN) or (file.suffix == ".toml" and file.parent.name != "minds")
    if file.parent.name != "cluster"  # manifests of Kubernetes
)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_example_is_a_valid_run_file(file):
    config = read(RunConfig, file)
    assert config.steps > 0 or config.stages


def test_examples_include_yaml_and_toml():
    assert {file.suffix for file in EXAMPLES} == {".yaml", ".toml"}


def parts(kind: type[Settings]) -> set[type[Settings]]:
    """Every settings class that a run file may hold."""
    kinds = {kind}
    for field in kind.model_fields.values():
        for member in members(field.annotation):
            kinds |= parts(member)
    return kinds


def test_every_key_is_read_and_documented():
    folder = Path(tinsmith.rl.__file__).parents[1]
    files = [file for part in ("rl", "cli", "integrations") for file in (folder / part).rglob("*.py")]
    source = "\n".join(file.read_text() for file in [*files, *folder.glob("*.py")])
    for kind in parts(RunConfig):
        for name, field in kind.model_fields.items():
            assert re.search(rf"\.{name}\b", source), f"{kind.__name__}.{name} is read nowhere"
            assert field_docs(kind).get(name) or name == "type" or members(field.annotation), (
                f"{kind.__name__}.{name} has no help"
            )


def test_settings_are_written_under_documented_keys():
    config = read(RunConfig, EXAMPLES[0])
    assert config.model_dump(mode="json").keys() == RunConfig.model_fields.keys()


def test_evaluation_without_held_out_tasks_is_an_error():
    base = {"model": {"name": "m"}, "rewards": [{"type": "number"}], "steps": 1}
    with pytest.raises(ValueError, match="eval needs held-out tasks"):
        RunConfig.model_validate(
            {**base, "tasks": {"train": {"type": "addition"}, "held_out": 0}, "eval": {"every": 5}}
        )


async def stateful_workflow(task: Task, conversation: Conversation) -> None:
    """A workflow whose turns have a state."""
    await conversation.say(*task.messages, state="here")


def test_gigpo_requires_a_workflow_with_states():
    base = {
        "model": {"name": "m"},
        "tasks": {"train": {"type": "addition"}},
        "rewards": [{"type": "number"}],
        "steps": 1,
    }
    for flow in ({"type": "single_turn"}, {"type": "math"}, {"type": "agent", "path": f"{__name__}:agent"}):
        gigpo = {"algorithm": {"type": "gigpo"}, "workflow": flow}
        with pytest.raises(ValueError, match=f"workflow {flow['type']} sets none; use multi_turn or custom, or"):
            RunConfig.model_validate({**base, **gigpo})
        cured = {"algorithm": {"type": "gigpo", "advantage": {"type": "step_wise_grpo"}}, "workflow": flow}
        assert RunConfig.model_validate({**base, **cured}).algorithm.type == "gigpo"
    custom = {"algorithm": {"type": "gigpo"}, "workflow": {"type": "custom", "path": f"{__name__}:stateful_workflow"}}
    assert RunConfig.model_validate({**base, **custom}).algorithm.advantage.reads_states


async def agent(task: Task, client: object, model: str) -> None:
    """An agent that samples nothing."""


@pytest.mark.parametrize("quick", [False, True])
def test_demos_are_run_files_in_new_folders(quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = demo.settings(quick=quick, seed=5, out=None, overrides=["steps=3"])
    assert (config.seed, config.steps, config.tasks.held_out) == (5, 3, 200)
    Path(config.folder).mkdir(parents=True)
    assert demo.settings(quick=quick, seed=5, out=None, overrides=[]).folder == f"{config.folder}-2"
    with pytest.raises(ConfigError, match="Did you mean 'steps'"):
        demo.settings(quick=quick, seed=5, out=None, overrides=["stepz=3"])


def test_max_steps_off_policy_is_another_name_of_staleness(tmp_path):
    values = settings(tmp_path).model_dump(exclude_unset=True)
    assert RunConfig.model_validate({**values, "max_steps_off_policy": 2}).staleness == 2
    with pytest.raises(ValueError, match="two names of one key"):
        RunConfig.model_validate({**values, "max_steps_off_policy": 2, "staleness": 2})


def test_high_staleness_must_be_allowed(tmp_path):
    assert settings(tmp_path, staleness=8).staleness == 8
    with pytest.raises(ValueError, match=r"staleness 9 is above 8.*set allow_high_staleness: true"):
        settings(tmp_path, staleness=9)
    assert settings(tmp_path, staleness=9, allow_high_staleness=True).staleness == 9


def test_defaults_of_staleness_bound_the_ratio(tmp_path):
    ahead = settings(tmp_path, staleness=1)
    loss = ahead.algorithm.loss
    assert isinstance(loss, PpoLoss)
    assert (loss.clip_low, loss.clip_high) == (0.2, 0.28)
    assert ahead.active_backoff == BackoffConfig()
    assert settings(tmp_path, staleness=1, backoff=None).active_backoff is None
    assert settings(tmp_path, staleness=1, sampling={"temperature": 0.7}).active_backoff is None
    assert settings(tmp_path, staleness=1, algorithm={"type": "grpo"}).algorithm == settings(tmp_path).algorithm
    assert settings(tmp_path).active_backoff is None
