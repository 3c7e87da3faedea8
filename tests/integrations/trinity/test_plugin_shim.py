"""Reward functions written for Trinity run from a plugin folder without Trinity; its other names are refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.integrations.trinity.files import SMALL, with_key, write
from tinsmith.dialects import RunFile, read_run
from tinsmith.errors import ConfigError
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Message, Rollout, Task, Turn

WRITTEN = """
from typing import Optional
from trinity.common.rewards import REWARD_FUNCTIONS
from trinity.common.rewards.reward_fn import RewardFn
from trinity.utils.log import get_logger

logger = get_logger(__name__)

@REWARD_FUNCTIONS.register_module("short")
class Short(RewardFn):
    def __init__(self, most: int = 3):
        self.most = most

    def __call__(self, response: str, prompt: Optional[str] = None, truth: Optional[str] = None, **kwargs):
        logger.info("called")
        return {"short": float(len(response) <= self.most), "right": float(response == truth)}

@REWARD_FUNCTIONS.register_module("kinder")
class Kinder(Short):
    def __call__(self, response, prompt):
        return sum(super().__call__(response=response).values()) + float("2+2" in prompt)
"""
REWARD, ARGS = "buffer.explorer_input.default_reward_fn_type", "buffer.explorer_input.taskset.reward_fn_args"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made, before = tmp_path / "plugins", list(sys.path)
    made.mkdir()
    (made / "written_for_trinity.py").write_text(WRITTEN)
    yield made
    sys.path[:] = before
    sys.modules.pop("written_for_trinity", None)


def read(folder: Path, *pairs: tuple[str, Any]) -> RunFile:
    values = SMALL
    for key, value in pairs:
        values = with_key(values, key, value)
    return read_run(write(folder.parent, values), [f"plugins={folder}"])


def reward_of(values: RunFile, reply: str) -> Any:
    task = Task(id="t", messages=(Message(role="user", content="2+2?"),), answer="4")
    turn = Turn(prompt=(), tokens=(), logprobs=(), text=reply, stop="stop")
    return asyncio.run(values.settings.rewards[0].judge(task, Rollout.single((turn,)), cast(Snapshot, None)))


def test_registered_class_becomes_a_reward(folder: Path):
    assert reward_of(read(folder, (REWARD, "short")), "4") == {"short": 1.0, "right": 1.0}
    assert reward_of(read(folder, (REWARD, "short"), (ARGS, {"most": 0})), "5") == {"short": 0.0, "right": 0.0}


def test_registered_class_can_be_subclassed(folder: Path):
    assert reward_of(read(folder, (REWARD, "kinder")), "no") == 2.0


def test_registered_class_works_in_tinsmith_files(folder: Path):
    ours = write(
        folder.parent,
        {"model": {"name": "m"}, "tasks": {"train": {"type": "addition"}}, "steps": 1, "plugins": str(folder)}
        | {"rewards": [{"type": "short", "most": 1}]},
    )
    assert reward_of(read_run(ours), "4") == {"short": 1.0, "right": 1.0}


def test_shim_is_removed_after_reading(folder: Path):
    read(folder, (REWARD, "short"))
    assert not [name for name in sys.modules if name.partition(".")[0] == "trinity"]


def test_wrong_arguments_are_named(folder: Path):
    with pytest.raises(ConfigError, match="mots"):
        read(folder, (REWARD, "short"), (ARGS, {"mots": 1}))


def test_other_names_of_trinity_are_refused(folder: Path):
    (folder / "flow_for_trinity.py").write_text("from trinity.common.workflows import WORKFLOWS")
    problem = r"flow_for_trinity\.py .* trinity\.common\.workflows\.WORKFLOWS is not available: a plugin can use"
    with pytest.raises(ConfigError, match=problem):
        read(folder, (REWARD, "short"))
