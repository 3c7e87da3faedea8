"""The example run files are valid, and every key of a run file is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tinsmith.rl
from tinsmith.errors import ConfigError
from tinsmith.rl import demo
from tinsmith.rl.config import RunConfig
from tinsmith.rl.types import Task
from tinsmith.rl.workflows.conversation import Conversation
from tinsmith.settings import Settings, read
from tools.reference.settings import members

ROOT = Path(__file__).parents[2]
FOREIGN = ("tinker.yaml", "verl.yaml")
"""Files of Trinity-RFT, which tinsmith.dialects reads."""
EXAMPLES = sorted(
    file for file in (ROOT / "examples").rglob("*") if file.suffix in (".yaml", ".toml") and file.name not in FOREIGN
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
    folder = Path(tinsmith.rl.__file__).parent
    source = "\n".join(
        file.read_text()
        for file in [*folder.rglob("*.py"), *(folder.parent / "cli").rglob("*.py"), *folder.parent.glob("*.py")]
    )
    for kind in parts(RunConfig):
        for name, field in kind.model_fields.items():
            assert re.search(rf"\.{name}\b", source), f"{kind.__name__}.{name} is read nowhere"
            assert field.description or name == "type" or members(field.annotation), (
                f"{kind.__name__}.{name} has no help"
            )


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
