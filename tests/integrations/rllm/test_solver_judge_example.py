"""The solver-judge example: its workflow on the scripted policy, and its scripts on a service with the fake engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from examples.solver_judge.solver_judge_flow import NO_ANSWER, SolverJudgeWorkflow, chosen_number
from examples.solver_judge_tinker import run_solver_judge_flow_tinker, train_solver_judge_flow_tinker
from tests.docs.test_pages import ROOT
from tests.integrations.rllm.flows import engine
from tinsmith.rllm import AgentWorkflowEngine, DatasetRegistry, Episode, countdown_reward_fn

pytestmark = pytest.mark.usefixtures("forked_programs")

TASK = {"question": "Reach 6 from 1, 2, 3.", "target": 6, "nums": [1, 2, 3]}
RIGHT, WRONG = "1 + 2 + 3", "1 + 2"
SCRIPTS = ROOT / "examples" / "solver_judge_tinker"


def play(*replies: str, count: int = 16, **more: Any) -> list[Episode]:
    args = {"reward_function": countdown_reward_fn, **more}
    runner = AgentWorkflowEngine(SolverJudgeWorkflow, args, engine(*replies))
    return asyncio.run(runner.execute_tasks([TASK] * count, ["t"] * count))


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("<answer>2</answer>", 2),
        ("first <answer>1</answer>, no: <ANSWER> 2 </ANSWER>", 2),
        ("2", 0),
        ("<answer>0</answer>", 0),
        ("<answer>-1</answer>", 0),
        ("<answer>3</answer>", 0),
        ("<answer>01</answer>", 0),
        ("<answer>１</answer>", 0),
        ("<answer>2.</answer>", 0),
        ("<answer>99999999999999999999</answer>", 0),
    ],
)
def test_choice_is_a_number_in_tags_within_range(reply: str, number: int):
    assert chosen_number(reply, 2) == number


def test_solvers_and_judge_are_rewarded_apart():
    for episode in play(f"<answer>{RIGHT}</answer>", f"<answer>{WRONG}</answer>", "<answer>1</answer>"):
        *solvers, judge = episode.trajectories
        assert [trajectory.name for trajectory in episode.trajectories] == ["solver", "solver", "judge"]
        answers = [solver.steps[0].action for solver in solvers]
        assert [solver.reward for solver in solvers] == [float(RIGHT in answer) for answer in answers]
        reply = judge.steps[0].model_output.content
        chosen = answers[0] if reply == "<answer>1</answer>" else ""
        assert judge.reward == float(RIGHT in chosen)
        assert episode.is_correct == (judge.reward == 1.0)
        rewards = [solver.reward for solver in solvers]
        assert episode.metrics == {"solver_acc": sum(rewards) / 2, "judge_acc": judge.reward}
        prompt = judge.steps[0].chat_completions[0]["content"]
        assert all(f"Answer {n}: {answer}" in prompt for n, answer in enumerate(answers, 1))


def test_replies_without_tags_are_no_answer_and_no_choice():
    (episode,) = play("six", count=1, n_solutions=3)
    assert [trajectory.steps[0].action for trajectory in episode.trajectories] == [NO_ANSWER] * 3 + [""]
    assert episode.metrics == {"solver_acc": 0.0, "judge_acc": 0.0}


@pytest.fixture(scope="module")
def variables(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables for the scripts: a service with the fake engine, and registered tasks."""
    folder = tmp_path_factory.mktemp("scripts")
    config = tinsmith.ServeConfig(models=(f"tiny={tiny_llama}",), data=folder / "service", engine="fake")
    with tinsmith.embedded(config) as (url, key):
        yield {"TINKER_BASE_URL": url, "TINKER_API_KEY": key, "TINSMITH_DATASETS": str(folder / "datasets")}


@pytest.fixture
def environment(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    for split, count in (("train", 4), ("test", 2)):
        rows = [{**TASK, "question": f"{n}: reach 6 in {split}."} for n in range(count)]
        DatasetRegistry.register_dataset("countdown", rows, split)
    return monkeypatch


def test_training_script_runs_with_overrides(
    environment: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    environment.setenv("PYTHON", "echo")  # prints the arguments in place of running them
    script = ["bash", str(SCRIPTS / "train_solver_judge_flow_tinker.sh"), "trainer.logger=['console']"]
    words = subprocess.run(script, capture_output=True, text=True, check=True).stdout.split()
    assert words[:2] == ["-m", "examples.solver_judge_tinker.train_solver_judge_flow_tinker"]
    words += [
        "model.name=tiny", "training.group_size=2", "data.train_batch_size=2", "data.max_response_length=4",
        "trainer.total_epochs=1", "trainer.default_local_dir=run",
    ]  # fmt: skip
    environment.setattr(sys, "argv", words[1:])
    train_solver_judge_flow_tinker.main()
    assert "2 steps; weights to sample from: tinker://" in capsys.readouterr().out
    rows = tinsmith.read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "reward/solver/mean" in row] == [1, 2]
    assert "eval/workflow/judge_acc" in rows[-1]


def test_evaluation_script_prints_pass_at_k(
    environment: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["run", "--model", "tiny", "--attempts", "2", "--max-tokens", "4", "--seed", "1", "--out", "episodes"]
    environment.setattr(sys, "argv", words)
    asyncio.run(run_solver_judge_flow_tinker.main(run_solver_judge_flow_tinker.parse()))
    names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["pass@1", "pass@2", "unbiased_pass@1", "unbiased_pass@2", "solver_acc", "judge_acc"]
    episodes = [Episode.from_dict(json.loads(line)) for line in (tmp_path / "episodes").read_text().splitlines()]
    assert [episode.id for episode in episodes] == ["0:0", "0:1", "1:0", "1:1"]
