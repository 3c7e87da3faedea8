"""A run that is killed anywhere and resumed ends like an uninterrupted one."""

from __future__ import annotations

import asyncio
import json
import random

import numpy as np
import pytest
from rich.console import Console

from tests.rl.scripted_run import Killed, breaking, rows, run, scripted, settings
from tinsmith.errors import ConfigError
from tinsmith.rl.run.folder import RunFolder
from tinsmith.rl.run.loop import train
from tinsmith.rl.run.state import RandomStates

STYLES = [
    (0, 1, "memory"),
    (1, 1, "memory"),
    (2, 1, "checkpoint"),
    (0, 3, "memory"),
    (1, 2, "checkpoint"),
    (0, 10, "memory"),
]


@pytest.fixture(scope="module", params=STYLES, ids=str)
def whole(request, tmp_path_factory):
    """Settings of weights, and the folder of an uninterrupted run with them."""
    staleness, interval, method = request.param
    how = {"staleness": staleness, "sync": {"interval": interval, "method": method}}
    folder = tmp_path_factory.mktemp("whole")
    run(settings(folder, **how))
    return how, folder


@pytest.mark.parametrize(
    ("at", "calls"),
    [
        ("train", 0),
        ("train", 2),
        ("train", 4),
        ("train", 5),
        ("save", 0),
        ("save", 1),
        ("save_for_sampling", 0),
        ("snapshot", 2),
    ],
)
def test_killed_run_resumes_with_equal_metrics(tmp_path, whole, at, calls):
    how, uninterrupted = whole
    broken = settings(tmp_path, **how)
    with pytest.raises(Killed):
        run(broken, breaking(tmp_path, calls=calls, at=at))
    assert run(broken).step == 8
    assert rows(tmp_path) == rows(uninterrupted)
    for file in (uninterrupted / "rollouts").iterdir():
        assert (tmp_path / "rollouts" / file.name).read_text() == file.read_text()


def test_global_random_states_are_restored():
    random.seed(3)
    np.random.seed(4)
    states = RandomStates.capture()
    drawn = random.random(), float(np.random.normal())
    RandomStates.model_validate_json(states.model_dump_json()).restore()
    assert (random.random(), float(np.random.normal())) == drawn


def test_partially_written_metrics_line_is_removed(tmp_path):
    run(settings(tmp_path, steps=3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert run(settings(tmp_path, steps=6)).step == 6
    assert sorted({row["step"] for row in rows(tmp_path)}) == [0, 1, 2, 3, 4, 5, 6]


def test_finished_run_resumes_with_more_steps(tmp_path):
    run(settings(tmp_path, steps=4, eval={"every": 0, "after": False}))
    run(settings(tmp_path, steps=8, eval={"every": 0, "after": False}))
    run(settings(tmp_path / "whole", steps=8, eval={"every": 0, "after": False}))
    assert rows(tmp_path) == rows(tmp_path / "whole")


def test_resuming_with_other_settings_names_them(tmp_path):
    run(settings(tmp_path, steps=1))
    with pytest.raises(ConfigError, match=r"different settings: group_size, optimizer\.learning_rate\.") as caught:
        run(settings(tmp_path, steps=1, group_size=5, optimizer={"learning_rate": 0.3}))
    assert "folder=" in caught.value.hint


def test_run_that_never_began_may_change_its_settings(tmp_path):
    async def no_server(state: str, version: int):
        raise ConfigError("No server responds.")

    with pytest.raises(ConfigError, match="No server responds"):
        run(settings(tmp_path, steps=1), no_server)
    assert run(settings(tmp_path, steps=1, group_size=5)).step == 1


def test_resume_false_rejects_an_existing_run(tmp_path):
    run(settings(tmp_path, steps=1))
    with pytest.raises(ConfigError, match="already holds a run"):
        run(settings(tmp_path, steps=2, resume=False))


def test_second_process_cannot_open_the_folder(tmp_path):
    folder = RunFolder.open(tmp_path, {"seed": 0})
    with pytest.raises(ConfigError, match="is using the run folder"):
        RunFolder.open(tmp_path, {"seed": 0})
    folder.close()
    RunFolder.open(tmp_path, {"seed": 0}).close()


def test_state_holds_batches_sampled_ahead(tmp_path):
    with pytest.raises(Killed):
        run(settings(tmp_path, staleness=2), breaking(tmp_path, calls=4, at="train"))
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["step"] == 3
    assert [batch["step"] for batch in state["batches"]["batches"]] == [4, 5]
    assert state["cursor"] == 5 * 3


def test_interrupted_run_can_be_resumed(tmp_path):
    config = settings(tmp_path, steps=500)

    async def interrupted():
        task = asyncio.create_task(train(config, scripted(tmp_path), Console(quiet=True)))
        async with asyncio.timeout(100):
            while not (tmp_path / "state.json").exists():  # noqa: ASYNC110  no event is set when it is written
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    done = json.loads((tmp_path / "state.json").read_text())["step"]
    assert run(settings(tmp_path, steps=done + 2)).step == done + 2
