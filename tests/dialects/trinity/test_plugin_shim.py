"""Reward functions written for Trinity run from a plugin folder, where Trinity is not; what else it has is refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.dialects.trinity.files import SMALL, laid, wrote
from tinsmith.dialects import RunFile, read_run
from tinsmith.errors import ConfigError
from tinsmith.rl.policy.base import Snapshot
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
        logger.info("asked")
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
        values = laid(values, key, value)
    return read_run(wrote(folder.parent, values), [f"plugins={folder}"])


def worth(found: RunFile, reply: str) -> Any:
    task = Task(id="t", messages=(Message(role="user", content="2+2?"),), answer="4")
    said = Turn(prompt=(), tokens=(), logprobs=(), text=reply, stop="stop")
    return asyncio.run(found.settings.rewards[0].judge(task, Rollout(turns=(said,)), cast(Snapshot, None)))


def test_a_registered_class_is_a_reward_with_arguments(folder: Path):
    assert worth(read(folder, (REWARD, "short")), "4") == {"short": 1.0, "right": 1.0}
    assert worth(read(folder, (REWARD, "short"), (ARGS, {"most": 0})), "5") == {"short": 0.0, "right": 0.0}


def test_a_class_may_derive_from_a_registered_one(folder: Path):
    assert worth(read(folder, (REWARD, "kinder")), "no") == 2.0


def test_it_is_a_type_in_a_file_of_ours_too(folder: Path):
    ours = wrote(
        folder.parent,
        {"model": {"name": "m"}, "tasks": {"train": {"type": "addition"}}, "steps": 1, "plugins": str(folder)}
        | {"rewards": [{"type": "short", "most": 1}]},
    )
    assert worth(read_run(ours), "4") == {"short": 1.0, "right": 1.0}


def test_trinity_is_not_there_afterwards(folder: Path):
    read(folder, (REWARD, "short"))
    assert not [name for name in sys.modules if name.partition(".")[0] == "trinity"]


def test_wrong_arguments_are_told(folder: Path):
    with pytest.raises(ConfigError, match="mots"):
        read(folder, (REWARD, "short"), (ARGS, {"mots": 1}))


def test_what_has_no_stand_in_is_refused_by_name(folder: Path):
    (folder / "flow_for_trinity.py").write_text("from trinity.common.workflows import WORKFLOWS")
    with pytest.raises(ConfigError, match=r"flow_for_trinity\.py .* trinity\.common\.workflows\.WORKFLOWS is not"):
        read(folder, (REWARD, "short"))
