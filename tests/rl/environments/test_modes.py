"""Runs with environments in two processes, in stages, from a checkpoint, as a comparison and as a single rollout."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field
from rich.console import Console

from tests.rl.environments.plugins.checking_environment import Checking
from tests.rl.environments.test_mixture import checking, mixture
from tests.rl.scripted_run import REPLIES, Killed, breaking, rows, run, scripted, settings
from tests.rl.test_bench import compared
from tests.rl.test_debug import shown
from tinsmith.rl.environments.base import OpeningRun
from tinsmith.rl.explore import explore
from tinsmith.rl.rollouts import store
from tinsmith.rl.rollouts.runner import Oversampling
from tinsmith.rl.run.loop import train
from tinsmith.rl.run.state import read_state
from tinsmith.rl.workflows.base import Workflow, WorkflowContext
from tinsmith.testing import ScriptedPolicy

ENVIRONMENTS = [checking("yes", weight=0.6), checking("no", weight=0.4), checking("perhaps", weight=0)]
SAID = {"type": "rows", "data": [{"question": f"{number}?", "answer": "yes"} for number in range(30)]}


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls the buffer every 10 ms."""
    monkeypatch.setattr(store, "POLL_SECONDS", 0.01)


def together(folder: Path, connect: Any = None, **changes: Any) -> None:
    """A process that samples and one that trains, in one event loop."""
    quiet = Console(file=io.StringIO())

    async def sampling() -> ScriptedPolicy:
        return ScriptedPolicy(REPLIES, folder / "run" / "weights")

    async def processes() -> None:
        async with asyncio.timeout(200), asyncio.TaskGroup() as group:
            group.create_task(explore(mixture(folder, ENVIRONMENTS, mode="explore", **changes), sampling, quiet))
            settings = mixture(folder, ENVIRONMENTS, mode="train", **changes)
            group.create_task(train(settings, connect or scripted(folder / "run"), quiet))

    asyncio.run(processes())


@pytest.mark.parametrize("staleness", [0, 2])
def test_two_processes_with_environments_equal_one(tmp_path, staleness):
    run(mixture(tmp_path / "one", ENVIRONMENTS, staleness=staleness))
    together(tmp_path / "two", staleness=staleness, buffer={"type": "file"}, sync={"timeout": 50})
    assert rows(tmp_path / "two" / "run") == rows(tmp_path / "one" / "run")


def test_killed_processes_draw_no_row_again(tmp_path):
    changes = {"staleness": 2, "buffer": {"type": "file"}, "sync": {"timeout": 50}}
    run(mixture(tmp_path / "one", ENVIRONMENTS, staleness=2))
    with pytest.raises(BaseExceptionGroup) as caught:
        together(tmp_path / "two", breaking(tmp_path / "two" / "run", calls=4, at="train"), **changes)
    assert caught.value.subgroup(Killed)
    together(tmp_path / "two", **changes)
    assert tasks(tmp_path / "two") == tasks(tmp_path / "one")


def tasks(folder: Path) -> list[str]:
    """Training tasks of all steps in order."""
    files = sorted((folder / "run" / "rollouts").glob("train-*.jsonl"))
    return [json.loads(line)["task"] for file in files for line in file.read_text().splitlines()]


def test_new_folder_continues_from_a_checkpoint(tmp_path):
    run(mixture(tmp_path / "whole", ENVIRONMENTS, staleness=1))
    source = str(tmp_path / "whole" / "run" / "checkpoints" / "step-000003.json")
    run(mixture(tmp_path / "later", ENVIRONMENTS, staleness=1, resume_from=source))
    assert rows(tmp_path / "later" / "run") == [row for row in rows(tmp_path / "whole" / "run") if row["step"] > 3]


def test_task_order_learns_within_each_environment(tmp_path):
    tasks = {"type": "tasks", "train": {"type": "largest", "size": 25}, "held_out": 5, "order": {"type": "difficulty"}}
    environments = [
        {**tasks, "name": reply, "rewards": [{"type": "format", "pattern": reply}]} for reply in ("yes", "no")
    ]
    run(mixture(tmp_path, environments, steps=6, groups_per_step=4))
    state = read_state(tmp_path / "run")
    assert state is not None
    expected = {name: {} for name in ("yes", "no")}
    for file in sorted((tmp_path / "run" / "rollouts").glob("train-*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for begin in range(0, len(lines), 4):
            name, _, task = lines[begin]["task"].partition("/")
            alpha, beta = expected[name].get(task, (1.0, 1.0))
            rate = sum(line["reward"] for line in lines[begin : begin + 4]) / 4
            expected[name][task] = (0.8 * alpha + 16 * rate, 0.8 * beta + 16 * (1 - rate))
    for name, beliefs in expected.items():
        (order,) = state.order["environments"][name]["order"]["lanes"]
        changed = sorted(pair for pair in zip(order["alpha"], order["beta"], strict=True) if pair != (1.0, 1.0))
        assert changed == [pytest.approx(pair) for pair in sorted(beliefs.values())]


def test_comparison_of_checkpoints_evaluates_every_environment(tmp_path):
    run(mixture(tmp_path, ENVIRONMENTS))
    table, text = compared(mixture(tmp_path, ENVIRONMENTS, mode="bench"), tmp_path / "run")
    assert len(table) == 2
    assert all(f"eval/say-{reply}/pass@1" in row for row in table for reply in REPLIES)
    assert "say-perhaps/pass@1" in text


def test_debug_shows_a_rollout_of_an_environment(tmp_path):
    text = shown(mixture(tmp_path, ENVIRONMENTS), scripted(tmp_path / "run"))
    assert "of environment say-" in text


def test_report_has_a_curve_for_each_environment(tmp_path):
    run(mixture(tmp_path, ENVIRONMENTS, monitors=[{"type": "report"}]))
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Reward by environment" in page
    assert "Held-out reward by source" in page
    assert "Skill above" not in page
    assert all(f"say-{reply}" in page for reply in REPLIES)


def test_plugins_are_types_inside_an_environment(tmp_path):
    sums = {"type": "tasks", "train": {"type": "addition"}, "held_out": 2, "workflow": {"type": "twice"}}
    environments = [{**sums, "name": text, "rewards": [{"type": "says", "text": text}]} for text in ("yes", "no")]
    run(mixture(tmp_path, environments, steps=1, groups_per_step=2))
    for line in lines(tmp_path):
        assert len(line["trajectories"][0]["turns"]) == 2
        assert line["reward_parts"] == {"says": line["reward"]}
        assert line["reward"] == (line["text"] == line["task"].partition("/")[0])


def lines(folder: Path) -> list[dict[str, Any]]:
    """Rollouts of the first step."""
    return list(map(json.loads, (folder / "run" / "rollouts" / "train-000001.jsonl").read_text().splitlines()))


def test_stage_without_rollouts_evaluates_the_environments(tmp_path):
    sft = {"name": "sft", "algorithm": {"type": "sft"}, "demonstrations": {"data": SAID}}
    config = mixture(tmp_path, ENVIRONMENTS, stages=[{**sft, "steps": 2}, {"name": "grpo", "steps": 1}])
    first, second = config.stage_config(1), config.stage_config(2)
    run(first)
    assert [row["eval/tasks"] for row in rows(Path(first.folder)) if "eval/tasks" in row] == [15, 15]
    assert [each.weight for each in second.environments] == [0.6, 0.4, 0]


def test_epochs_count_passes_over_a_single_environment(tmp_path):
    config = mixture(tmp_path, ENVIRONMENTS[::2], steps=0, epochs=1)
    assert run(config).step == 25 // 3


class Counter:
    """A resource that counts the rollouts since the last metrics."""

    def __init__(self) -> None:
        self.rollouts, self.closed = 0, False

    def metrics(self) -> dict[str, float]:
        count, self.rollouts = self.rollouts, 0
        return {"counter/rollouts": count}

    async def close(self) -> None:
        self.closed = True


class Opening(Checking):
    """Opens a counter of its rollouts."""

    label: str = "yes"
    sampling: dict[str, Any] = Field(default_factory=lambda: {"max_tokens": 7, "temperature": 0.97})

    async def open(self, run: OpeningRun) -> None:
        OPENED.append((run.policy is not None, run.resources.setdefault("counter", Counter())))

    def make(self, context: WorkflowContext) -> Workflow:
        context.resources["counter"].rollouts += 1
        return super().make(context)


class OpeningOfPolicy(Opening):
    """Opens only where a policy is in training."""

    needs_policy = True


OPENED: list[tuple[bool, Any]] = []


def test_environment_opens_its_resources_once_in_each_mode(tmp_path):
    entries = [{"type": "custom", "path": Opening, "name": "opening"}, checking("no")]
    OPENED.clear()
    run(mixture(tmp_path, entries, steps=2))
    compared(mixture(tmp_path, entries, mode="bench"), tmp_path / "run")
    shown(mixture(tmp_path, entries), scripted(tmp_path / "run"))
    assert [has_policy for has_policy, _ in OPENED] == [True, False, True]
    assert all(counter.closed for _, counter in OPENED)
    assert [row["counter/rollouts"] for row in rows(tmp_path / "run") if "reward/mean" in row] == [2, 0]


@pytest.mark.parametrize("mode", ["explore", "bench"])
def test_mode_without_policy_refuses_environment_that_needs_it(tmp_path, mode):
    entry = {"type": "custom", "path": OpeningOfPolicy, "name": "opening"}
    with pytest.raises(ValueError, match=f"mode {mode} has no policy in training, which environment opening needs"):
        mixture(tmp_path, [entry], mode=mode, buffer={"type": "file"})


def test_section_that_no_type_adds_is_refused(tmp_path):
    class Shared(Opening):
        sections: ClassVar[Any] = {"rooms": Oversampling}

    with pytest.raises(ValueError, match="there is no section rooms"):
        mixture(tmp_path, [{"type": "custom", "path": Shared, "name": "shared"}])


def test_environment_is_no_workflow(tmp_path):
    with pytest.raises(ValueError, match="is an environment, with tasks of its own; list it in environments"):
        settings(tmp_path, workflow={"type": "custom", "path": Opening})
