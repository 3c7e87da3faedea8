"""Plugins: a folder of files whose marked functions and classes are types of a run file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rl.scripted_run import rows, run, settings
from tinsmith.errors import ConfigError
from tinsmith.settings import read

REWARDS = '''
from tinsmith.rl.plugins import reward
from tinsmith.rl.rewards import Reward
from own_words import WORD

@reward("short")
def short(task, rollout, most=3):
    return 1.0 if len(rollout.text) <= most else 0.0

@reward("wordy")
class Wordy(Reward):
    """1 if the reply has the word."""
    word: str = WORD

    def score(self, task, text):
        return {"found": float(self.word in text), "long": 0.1}

@reward("counted")
class Counted:
    def __init__(self, base=0.0):
        self.base = base

    async def __call__(self, task, rollout):
        return self.base + len(rollout.turns)
'''
FLOW = """
from tinsmith.rl.plugins import workflow

@workflow("ask")
async def ask(task, conversation, politely=False):
    await conversation.say(*task.messages, *(["please"] if politely else []))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of plugins; modules imported from it are removed after the test."""
    made = tmp_path / "own"
    made.mkdir()
    (made / "own_words.py").write_text('WORD = "yes"\n')
    (made / "own_rewards.py").write_text(REWARDS)
    (made / "own_flow.py").write_text(FLOW)
    modules, path = set(sys.modules), list(sys.path)
    yield made
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_marked_plugins_are_types_with_options(folder):
    config = settings(
        folder.parent / "run",
        plugins=str(folder),
        workflow={"type": "ask", "politely": True},
        rewards=[{"type": "short", "most": 2, "weight": 0.5}, {"type": "wordy"}, {"type": "counted", "base": 1}],
        steps=1,
        resume=False,
    )
    assert config.workflow.path == "own_flow:ask"
    run(config)
    (row,) = [row for row in rows(folder.parent / "run") if "reward/mean" in row]
    assert row["reward/counted"] == 2.0
    assert row["reward/wordy/long"] == pytest.approx(0.1)
    assert 0 < row["reward/short"] < 1
    assert row["reward/mean"] == pytest.approx(0.5 * row["reward/short"] + row["reward/wordy"] + row["reward/counted"])


def test_plugin_folder_may_be_an_override(folder, tmp_path):
    from tinsmith.rl.config import RunConfig

    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {name: x}\ntasks: {train: {type: addition}}\nsteps: 1\nrewards: [{type: short}]\nname: small\n"
    )
    config = read(RunConfig, file, [f"plugins={folder}"])
    assert config.rewards[0].path == "own_rewards:short"
    with pytest.raises(ConfigError, match="no type 'short'"):
        read(RunConfig, file)


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        ([{"type": "short", "mots": 2}], "mots"),
        ([{"type": "wordy", "wrod": "x"}], "'wrod'"),
        ([{"type": "shrot"}], "shrot"),
        ([{"type": "custom", "path": "own_words:WORD"}], "neither a function nor a class"),
    ],
)
def test_wrong_plugin_options_are_named(folder, tmp_path, rewards, sentence):
    with pytest.raises(ValueError, match=sentence):
        settings(tmp_path, plugins=str(folder), rewards=rewards)


def test_plugin_files_that_cannot_be_imported_are_named(folder, tmp_path):
    (folder / "own_broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"own_broken.py cannot be imported: ZeroDivisionError"):
        settings(tmp_path, plugins=str(folder))
    (folder / "own_broken.py").write_text("from trinity.common.workflows import WORKFLOWS")
    with pytest.raises(ConfigError, match=r"imports trinity.*Trinity's own classes are not available"):
        settings(tmp_path, plugins=str(folder))
    (folder / "own_broken.py").unlink()
    (folder / "json.py").write_text("")
    with pytest.raises(ConfigError, match="the name of another module"):
        settings(tmp_path, plugins=str(folder))
    with pytest.raises(ConfigError, match="there is no folder"):
        settings(tmp_path, plugins=str(folder / "nowhere"))
