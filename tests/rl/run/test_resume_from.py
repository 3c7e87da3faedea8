"""`resume_from` with the scripted policy: a continued run equals one that never stopped."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from tests.rl.scripted_run import Killed, breaking, rows, run, scripted, settings
from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.run.state import read_state
from tinsmith.rl.types import Rollout, Task
from tinsmith.rl.workflows.base import WorkflowPolicy

SIX: dict[str, Any] = {"steps": 6, "eval": {"every": 2}, "checkpoint": {"every": 1}}


def checkpoint(folder: Path, step: int) -> str:
    """Path of the weights after `step`."""
    return json.loads(state_file(folder, step).read_text())["path"]


def state_file(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:06}.json"


def assert_equal_runs(folder: Path, whole: Path, first_step: int = 0) -> None:
    """Metrics, rollouts, weights, data position and random states are equal from `first_step` on."""
    assert rows(folder) == [row for row in rows(whole) if row["step"] >= first_step]
    names = {file.name for file in (whole / "rollouts").iterdir() if int(file.stem[-6:]) >= first_step}
    assert {file.name for file in (folder / "rollouts").iterdir()} == names
    for name in names:
        assert (folder / "rollouts" / name).read_text() == (whole / "rollouts" / name).read_text()
    state, expected = read_state(folder), read_state(whole)
    assert state is not None
    assert expected is not None
    assert Path(state.path).read_text() == Path(expected.path).read_text()
    own = {"path", "checkpoints", "sampling_path", "origin", "reference"}
    assert state.model_dump(exclude=own) == expected.model_dump(exclude=own)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"staleness": 2},
        {"staleness": 1, "sync": {"interval": 2, "method": "checkpoint"}},
        {"tasks": {"train": {"type": "addition"}, "held_out": 5, "order": {"type": "difficulty"}}},
        {"tasks": {"train": [{"type": "addition"}, {"type": "largest", "size": 50}], "held_out": 5}},
    ],
    ids=["synchronous", "ahead", "interval", "curriculum", "mixed"],
)
def test_resumed_and_reset_runs_equal_an_uninterrupted_one(tmp_path, changes):
    whole, resumed, reset = (tmp_path / name for name in ("whole", "resumed", "reset"))
    run(settings(whole, **SIX, **changes))
    with pytest.raises(Killed):
        run(settings(resumed, **SIX, **changes), breaking(resumed, calls=3, at="train"))
    assert read_state(resumed).step == 3  # type: ignore[union-attr]
    run(settings(resumed, **SIX, **changes))
    assert_equal_runs(resumed, whole)
    with pytest.raises(Killed):
        run(settings(reset, **SIX, **changes), breaking(reset, calls=4, at="train"))
    run(settings(reset, **SIX, **changes, resume_from=checkpoint(reset, 3)))
    assert_equal_runs(reset, whole)


def test_finished_run_goes_back_and_drops_later_checkpoints(tmp_path):
    run(settings(tmp_path / "run", **SIX))
    run(settings(tmp_path / "whole", **SIX))
    source = checkpoint(tmp_path / "run", 2)
    with pytest.raises(Killed):
        run(settings(tmp_path / "run", **SIX, resume_from=source), breaking(tmp_path / "run", calls=0, at="train"))
    state = read_state(tmp_path / "run")
    assert state is not None
    assert (state.step, state.origin) == (2, source)
    assert [Path(paths[0]).stem for paths in state.checkpoints] == ["step-000001-1", "step-000002-2"]
    assert not state_file(tmp_path / "run", 3).exists()
    assert {row["step"] for row in rows(tmp_path / "run")} == {0, 1, 2}
    run(settings(tmp_path / "run", **SIX))  # also without resume_from
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


def test_same_command_does_not_go_back_twice(tmp_path):
    run(settings(tmp_path, **SIX))
    config = settings(tmp_path, **SIX, resume_from=checkpoint(tmp_path, 2))
    with pytest.raises(Killed):
        run(config, breaking(tmp_path, calls=2, at="train"))
    steps: list[int] = []
    console = Console(file=io.StringIO(), soft_wrap=True)
    assert run(config, counting(tmp_path, steps), console).step == 6
    assert "has continued from" in console.file.getvalue()  # type: ignore[attr-defined]
    assert steps == [4]  # step 5; step 6 has no signal
    assert run(config, counting(tmp_path, steps)).step == 6
    assert steps == [4]


def counting(folder: Path, steps: list[int]):
    """Connect to a policy that appends its version to `steps` before each batch is trained on."""

    async def connect(state: str, version: int):
        policy = await scripted(folder)(state, version)
        train = policy.train

        async def counted(*args):
            steps.append(policy.version)
            return await train(*args)

        policy.train = counted
        return policy

    return connect


@pytest.mark.parametrize("changes", [{}, {"staleness": 2}], ids=["synchronous", "ahead"])
def test_new_folder_continues_from_a_state_file(tmp_path, changes):
    run(settings(tmp_path / "whole", **SIX, **changes))
    new = settings(tmp_path / "new", **SIX, **changes, resume_from=str(state_file(tmp_path / "whole", 3)))
    run(new)
    assert_equal_runs(tmp_path / "new", tmp_path / "whole", first_step=4)
    state = read_state(tmp_path / "new")
    assert state is not None
    assert len(state.checkpoints) == 3
    assert state.origin == checkpoint(tmp_path / "whole", 3)


def test_new_folder_killed_before_a_checkpoint_starts_there(tmp_path):
    """Also if the second command leaves out resume_from."""
    run(settings(tmp_path / "whole", **SIX))
    source = str(state_file(tmp_path / "whole", 3))
    new = tmp_path / "new"
    with pytest.raises(Killed):
        run(settings(new, **SIX, resume_from=source), breaking(new, calls=0, at="train"))
    run(settings(new, **SIX))
    assert_equal_runs(new, tmp_path / "whole", first_step=4)


def test_deleted_checkpoints_lose_their_state_files(tmp_path):
    run(settings(tmp_path, **{**SIX, "checkpoint": {"every": 1, "keep": 2}}))
    files = sorted(file.name for file in (tmp_path / "checkpoints").iterdir())
    assert files == ["step-000005.json", "step-000006.json"]
    state = read_state(tmp_path)
    assert state is not None
    assert len(state.checkpoints) == 2
    run(settings(tmp_path, **{**SIX, "checkpoint": {"every": 1, "keep": 2}}, resume_from=checkpoint(tmp_path, 5)))
    state = read_state(tmp_path)
    assert state is not None
    assert [Path(paths[0]).stem for paths in state.checkpoints] == ["step-000005-5", "final-5"]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("tinker://other:train:0/weights/step-000003", "is not a checkpoint of the run in .*, which is at step 6"),
        ("nowhere/checkpoints/step-000003.json", "nowhere/checkpoints/step-000003.json does not exist"),
        ("pyproject.json", "pyproject.json does not exist"),
    ],
)
def test_run_refuses_checkpoints_that_are_not_its_own(finished_six, source, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        run(settings(finished_six, **SIX, resume_from=source))
    assert caught.value.hint
    assert read_state(finished_six).step == 6  # type: ignore[union-attr]


def test_refused_checkpoint_leaves_the_logs(finished_six):
    before = rows(finished_six, timeless=False)
    source = checkpoint(finished_six, 4)

    async def no_checkpoint(state: str, version: int):
        from tinsmith.errors import NotFound

        raise NotFound(f"There is no checkpoint {state}.")

    with pytest.raises(ConfigError, match="resume_from: There is no checkpoint"):
        run(settings(finished_six, **SIX, resume_from=source), no_checkpoint)
    assert rows(finished_six, timeless=False) == before
    assert read_state(finished_six).step == 6  # type: ignore[union-attr]


def test_checkpoint_of_the_last_step_needs_more_steps(tmp_path, finished_six):
    source = str(state_file(finished_six, 6))
    with pytest.raises(ConfigError, match="is of step 6, and the run has 6 steps"):
        run(settings(tmp_path, **SIX, resume_from=source))
    assert run(settings(tmp_path, **{**SIX, "steps": 7}, resume_from=source)).step == 7


@pytest.fixture(scope="module")
def finished_six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of 6 steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("six")
    run(settings(folder, **SIX))
    return folder


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"resume_from": "tinker://a/sampler_weights/b"}, "have no optimizer state"),
        ({"resume_from": "runs/addition"}, "names no checkpoint"),
        ({"mode": "bench"}, "not used with mode bench"),
        ({"mode": "explore", "buffer": {"type": "file"}}, "not used with mode explore"),
        ({"buffer": {"type": "file"}}, "needs buffer.type memory"),
        ({"stages": [{"name": "a"}]}, "needs a run without stages"),
    ],
)
def test_settings_that_cannot_resume_from_are_named(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        settings(tmp_path, **{"resume_from": "tinker://a/weights/step-000001", **changes})


def test_stage_cannot_set_resume_from(tmp_path):
    stage = {"name": "a", "resume_from": "tinker://a/weights/b"}
    with pytest.raises(ValidationError, match="stage a: resume_from cannot differ between stages"):
        RunConfig.model_validate({**settings(tmp_path).model_dump(), "stages": [stage]})


class Roles:
    """Two guesses and a check; what earlier rollouts of the run said changes the prompt of the check."""

    async def run(self, task: Task, policy: WorkflowPolicy) -> Rollout:
        said: list[str] = policy.store.setdefault("said", [])
        for role in ("guess", "guess", "check"):
            conversation = policy.conversation(role)
            reply = await conversation.say(*task.messages, " ".join(said[-2:]))
            conversation.reward = float(reply.text == ("yes" if role == "guess" else "perhaps"))
            if not policy.evaluating:
                said.append(reply.text)
        policy.store["unsaved"] = object()
        return policy.rollout(correct="yes" in said[-3:], metrics={"said": len(said)})


@pytest.mark.parametrize("staleness", [0, 2])
def test_roles_and_their_shared_store_resume_exactly(tmp_path, staleness, caplog):
    changes = {"workflow": {"type": "custom", "path": Roles}, "rewards": [], "staleness": staleness, "concurrency": 1}
    changes["optimizer"] = {"learning_rate": 0.05}
    whole, reset = tmp_path / "whole", tmp_path / "reset"
    run(settings(whole, **SIX, **changes))
    assert "policy.store['unsaved'] is not saved: JSON cannot hold a object" in caplog.text
    state = read_state(whole)
    assert state is not None
    assert len(state.store["said"]) == 6 * 3 * 4 * 3
    with pytest.raises(Killed):
        run(settings(reset, **SIX, **changes), breaking(reset, calls=4, at="train"))
    run(settings(reset, **SIX, **changes, resume_from=checkpoint(reset, 3)))
    assert_equal_runs(reset, whole)
    assert {"reward/guess/mean", "reward/check/mean", "workflow/said"} <= rows(whole)[1].keys()
