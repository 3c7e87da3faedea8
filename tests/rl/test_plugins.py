"""Plugins: a folder of files whose marked functions and classes are types of a run file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rl.scripted_run import rows, run, settings
from tinsmith.dialects import read_run
from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
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
NEEDS = """
from tinsmith.rl.plugins import advantage, reward

@reward("weighed")
def weighed(task, rollout, table, scale=1.0):
    return scale

@reward("narrow")
def narrow(task):
    return 1.0

@advantage("even")
def even(rewards):
    return rewards
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
    with pytest.raises(ConfigError, match=r"imports trinity, which is not installed"):
        settings(tmp_path, plugins=str(folder))
    (folder / "own_broken.py").unlink()
    (folder / "json.py").write_text("")
    with pytest.raises(ConfigError, match="the name of another module"):
        settings(tmp_path, plugins=str(folder))
    with pytest.raises(ConfigError, match="there is no folder"):
        settings(tmp_path, plugins=str(folder / "nowhere"))


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("rewards: [{type: shrot}]", "'rewards.0' has no type 'shrot'. Did you mean 'short'?"),
        (
            "rewards: [{type: qqq}]",
            "'rewards.0' has no type 'qqq'. Known here: counted, narrow, short, weighed, wordy, number,",
        ),
        (
            "rewards: [{type: short, mots: 2}]",
            "'rewards.0': own_rewards:short has no argument 'mots'. Did you mean 'most'? It takes: most.",
        ),
        (
            "rewards: [{type: number}, {type: short, weigth: 2}]",
            "'rewards.1': own_rewards:short has no argument 'weigth'. Did you mean 'weight'? It takes: most.",
        ),
        ("rewards: [{type: short, task: 2}]", "own_rewards:short: the run itself passes 'task'; leave it out."),
        ("rewards: [{type: wordy, wrod: x}]", "own_rewards:Wordy: there is no key 'wrod'. Did you mean 'word'?"),
        ("rewards: [{type: counted, bas: 1}]", "own_rewards:Counted has no argument 'bas'. Did you mean 'base'?"),
        ("rewards: [{type: weighed}]", "own_needs:weighed needs the argument 'table'. It takes: table, scale."),
        (
            "rewards: [{type: narrow}]",
            "own_needs:narrow does not take what a run passes to it: it must be callable with (task, rollout).",
        ),
        ("workflow: {type: aks}", "'workflow' has no type 'aks'. Did you mean 'ask'?"),
        ("workflow: {type: ask, polite: 1}", "'workflow': own_flow:ask has no argument 'polite'."),
        ("algorithm: {advantage: {type: evenn}}", "'algorithm.advantage' has no type 'evenn'. Did you mean 'even'?"),
        (
            "algorithm: {advantage: {type: even, scale: 1}}",
            "'algorithm.advantage': own_needs:even has no argument 'scale'. It takes no arguments.",
        ),
    ],
)
def test_faults_of_plugins_name_keys_that_exist(folder, tmp_path, section, sentence):
    (folder / "own_needs.py").write_text(NEEDS)
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{name: x}}\nplugins: own\ntasks: {{train: {{type: addition}}}}\nsteps: 1\n{section}\n")
    with pytest.raises(ConfigError) as caught:
        read_run(file)
    assert sentence in caught.value.message
    assert ".custom" not in caught.value.message


def test_plugins_are_beside_the_file_or_in_the_working_folder(folder, tmp_path, monkeypatch):
    file = tmp_path / "files" / "run.yaml"
    file.parent.mkdir()
    text = "model: {name: x}\nplugins: own\ntasks: {train: {type: addition}}\nsteps: 1\nrewards: [{type: short}]\n"
    file.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert read_run(Path("files/run.yaml")).settings.plugins == "own"  # of the working folder
    (tmp_path / "run.yaml").write_text(text)
    monkeypatch.chdir(tmp_path / "files")
    for place in (tmp_path, Path("..")):
        assert Path(read_run(place / "run.yaml").settings.plugins) == place / "own"
    with pytest.raises(ConfigError, match="there is no folder own"):
        read_run(Path("run.yaml"))
    assert read_run(Path("run.yaml"), ["plugins=../own"]).settings.plugins == "../own"


@pytest.mark.parametrize(
    "section",
    [
        "rewards: [{type: mine}]",
        "workflow: {type: mine}",
        "filters: [{type: mine}]",
        "callbacks: [{type: mine}]",
        "monitors: [{type: mine}]",
        "algorithm: {type: mine}",
        "algorithm: {loss: {type: mine}}",
        "algorithm: {advantage: {type: mine}}",
        "sampling: {method: {type: mine}}",
        "eval: {functions: [{type: mine}]}",
        "tasks: {train: {type: mine}}",
        "tasks: {train: {type: addition}, order: {type: mine}}",
        "environments: [{type: mine}]",
    ],
)
def test_unknown_type_without_plugins_names_the_key(tmp_path, section):
    (tmp_path / "run.yaml").write_text(f"model: {{name: tiny}}\nsteps: 1\n{section}\n")
    with pytest.raises(ConfigError, match=r"no type 'mine'.* plugins: FILE\.py\."):
        read(RunConfig, tmp_path / "run.yaml")
