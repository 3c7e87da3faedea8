"""Stages of a run pass on their weights, and a run killed in any stage resumes there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.rl.algorithms.helpers import run as awaited
from tests.rl.scripted_run import REPLIES, Killed, rows, settings
from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.stages import run_stages
from tinsmith.settings import build, explicit_values, read
from tinsmith.testing import ScriptedPolicy

SFT = {
    "name": "sft",
    "algorithm": {"type": "sft"},
    "demonstrations": {"data": {"type": "jsonl", "path": "said.jsonl"}},
    "optimizer": {"learning_rate": 1.0},
    "steps": 4,
}
GRPO = {"name": "grpo", "steps": 5}
LAST = {"name": "last", "algorithm": {"type": "rloo", "reference": "start"}, "epochs": 0.01, "keep_optimizer": True}


def staged_settings(folder: Path, *stages: dict, **changes) -> RunConfig:
    """Settings of a run in stages; sft, grpo and rloo by default."""
    said = folder.parent / "said.jsonl"
    said.write_text("\n".join(json.dumps({"question": f"{n}?", "answer": "yes"}) for n in range(7)))
    sft = {**SFT, "demonstrations": {"data": {"type": "jsonl", "path": str(said)}}}
    tasks = {"train": {"type": "largest", "size": 1005}, "held_out": 5}
    chosen = [sft if stage is SFT else stage for stage in stages or (SFT, GRPO, LAST)]
    return settings(folder, stages=chosen, steps=0, tasks=tasks, checkpoint={"every": 2}, **changes)


class Server(ScriptedPolicy):
    """Opens checkpoints by their paths, as a server does."""

    async def open_model(self, name: str):
        return await (self.open_checkpoint(name, 0) if "/" in name else super().open_model(name))


class Policies:
    """Makes the policies of stages and records (name, state, load_from) of each; may raise Killed in method `at`."""

    def __init__(self, folder: Path, at: str = "", calls: int = 0) -> None:
        self.connections: list[tuple[str, str, str]] = []
        self._folder, self._at, self._left = folder, at, calls

    def __call__(self, config: RunConfig):
        weights = self._folder / "weights" / config.name.rpartition(" ")[2]

        async def connect(state: str, version: int):
            self.connections.append((config.name, state, config.model.load_from))
            start = state or config.model.load_from
            policy = Server(REPLIES, weights, state=start, version=version)
            if self._at:
                method = getattr(policy, self._at)

                async def killed_call(*args, **kwargs):
                    self._left -= 1
                    if self._left < 0:
                        raise Killed
                    return await method(*args, **kwargs)

                setattr(policy, self._at, killed_call)
            return policy

        return connect


def run(config: RunConfig, policies: Policies | None = None):
    return awaited(run_stages(config, policies or Policies(Path(config.folder)), Console(quiet=True)))


FOLDERS = ("01-sft", "02-grpo", "03-last")


def test_each_stage_starts_from_the_previous_weights(tmp_path):
    policies = Policies(tmp_path / "run")
    last, state = run(staged_settings(tmp_path / "run"), policies)
    record = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert record["under_way"] == ""
    assert list(record["ended"]) == ["sft", "grpo", "last"]
    assert policies.connections == [
        ("small sft", "", ""),
        ("small grpo", "", record["ended"]["sft"]),
        ("small last", record["ended"]["grpo"], record["ended"]["grpo"]),  # it keeps the optimizer
    ]
    assert (last.name, last.steps, state.step) == ("small last", 0, 3)
    first, second, third = (rows(tmp_path / "run" / folder) for folder in FOLDERS)
    assert next(row["eval/pass@1"] for row in second if "eval/pass@1" in row) == first[-1]["eval/pass@1"] == 1.0
    assert len([row for row in first if "optim/expert_nll" in row]) == 4
    assert len([row for row in second if "reward/mean" in row]) == 5
    assert len([row for row in third if "reward/mean" in row]) == 3
    assert state.reference.startswith(str(tmp_path / "run" / "weights" / "last" / "start"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("stages") / "whole"
    run(staged_settings(folder))
    return folder


@pytest.mark.parametrize(
    ("at", "calls"),
    [
        ("train", 0),
        ("train", 3),
        ("train", 4),
        ("train", 7),
        ("save", 2),
        ("save", 4),
        ("save_for_sampling", 0),
        ("save_for_sampling", 1),
        ("save_for_sampling", 2),
        ("snapshot", 9),
        ("snapshot", 14),
    ],
)
def test_run_killed_in_any_stage_resumes_with_equal_metrics(tmp_path, whole, at, calls):
    broken = staged_settings(tmp_path / "broken")
    with pytest.raises(Killed):
        run(broken, Policies(tmp_path / "broken", at, calls))
    run(broken)
    for folder in FOLDERS:
        assert rows(tmp_path / "broken" / folder) == rows(whole / folder)


BENCH = {"name": "try", "mode": "bench", "eval": {"temperature": 1.0, "num_samples": 4}}


def test_bench_stage_compares_the_previous_weights(tmp_path):
    first = {**BENCH, "name": "base"}
    stages = (first, SFT, BENCH, {**GRPO, "steps": 1})
    config = staged_settings(tmp_path / "run", *stages, model={"name": "scripted", "rank": 4})
    last, state = run(config)
    record = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert (last.name, last.model.load_from, state.step) == ("small grpo", record["ended"]["sft"], 1)
    assert list(record["ended"]) == ["base", "sft", "try", "grpo"]

    def compared(folder: str) -> list[str]:
        rows = json.loads((tmp_path / "run" / folder / "bench" / "results.json").read_text())
        return [row["checkpoint"] for row in rows]

    assert compared("01-base") == ["scripted"]
    assert compared("03-try") == ["scripted", record["ended"]["sft"].replace("final", "final-sampling")]
    assert not (tmp_path / "run" / "03-try" / "state.json").exists()
    again = Policies(tmp_path / "run")
    run(config, again)
    assert again.connections == []


def test_stages_file_names_the_current_stage(tmp_path):
    config = staged_settings(tmp_path / "run")
    with pytest.raises(Killed):
        run(config, Policies(tmp_path / "run", "train", 6))
    record = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert (record["under_way"], list(record["ended"])) == ("grpo", ["sft"])


def test_finished_run_accepts_another_stage(tmp_path):
    run(staged_settings(tmp_path / "run", SFT, GRPO))
    policies = Policies(tmp_path / "run")
    run(staged_settings(tmp_path / "run", SFT, GRPO), policies)
    assert policies.connections == []
    _, state = run(staged_settings(tmp_path / "run", SFT, GRPO, LAST), policies)
    assert [name for name, _, _ in policies.connections] == ["small last"]
    assert state.step == 3


def test_resuming_with_other_stages_is_an_error(tmp_path):
    run(staged_settings(tmp_path / "run", SFT, GRPO))
    with pytest.raises(ConfigError, match="holds a run of the stages sft, grpo"):
        run(staged_settings(tmp_path / "run", GRPO))
    with pytest.raises(ConfigError, match=r"02-grpo holds a run with different settings: group_size"):
        run(staged_settings(tmp_path / "run", SFT, {**GRPO, "group_size": 7}))
    with pytest.raises(ConfigError, match="holds a run in stages"):
        run(settings(tmp_path / "run"))
    alone = staged_settings(tmp_path / "other", GRPO)
    run(settings(tmp_path / "other", steps=1, tasks=explicit_values(alone.tasks), checkpoint={"every": 2}))
    with pytest.raises(ConfigError, match="holds a run without stages"):
        run(alone)


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ([{"name": "a", "stepz": 3}], r"stages\.0\.stepz\n.* there is no key 'stepz'. Did you mean 'steps'"),
        ([{"name": "a", "steps": 2}, {"name": "b"}], "stage b: steps is missing; set steps or epochs"),
        ([{"name": "a", "steps": 2, "model": {"name": "m"}}], "stage a: model cannot differ between stages"),
        ([{"name": "a", "steps": 2, "mode": "explore"}], "stage a: mode explore needs a second process that trains"),
        ([{"name": "a", "mode": "bench"}], "no stage trains; take mode bench for the whole run"),
        ([{"name": "a", "steps": 2, "algorithm": {"type": "sft"}}], "stage a: demonstrations is missing"),
        ([{"name": "a", "steps": 2, "algorithm": {"type": "rloo", "reference": "start"}}], "stage a: .*load_from"),
    ],
)
def test_errors_of_a_stage_name_the_stage(tmp_path, stages, sentence):
    with pytest.raises((ConfigError, ValueError), match=sentence):
        settings(tmp_path, stages=stages, steps=0)


def test_each_fault_of_stages_is_shown_once_with_its_place(tmp_path):
    file = tmp_path / "run.yaml"
    values = {
        **explicit_values(settings(tmp_path)),
        "group_size": 1,
        "stages": [
            {"name": "a", "optimizer": {"learning_rate": "fast"}, "rewards": [{"type": "clos"}]},
            {"name": "b", "eval": {"evry": 1}},
            {"name": "c", "staleness": 9},
            {"name": "d"},
        ],
    }
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as refusal:
        read(RunConfig, file, ["stages.0.optimizer.learning_rate=x"])
    lines = str(refusal.value).splitlines()
    for start in (
        "the command line: 'stages.0.optimizer.learning_rate': takes a number (got 'x').",
        f"{file}: 'stages.0.rewards.0': has no type 'clos'. Did you mean 'closeness'?",
        f"{file}: 'stages.1.eval.evry': there is no key 'eval.evry'. Did you mean 'eval.every'?",
        f"{file}: stage c: staleness 9 is above 8",
        f"{file}: stage d: group_size 1 leaves no rollouts to compare",
    ):
        assert [line for line in lines if line.startswith(start)]
    assert len(lines) == 5
    values = {**values, "stages": [{"name": "e"}, {"name": "f"}]}
    with pytest.raises(ConfigError, match=r"^run: stages e and f: group_size 1 leaves no rollouts[^\n]*$"):
        build(RunConfig, values, "run")


def test_duplicate_stage_names_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="two stages are called grpo"):
        staged_settings(tmp_path / "run", GRPO, GRPO)


def test_sections_of_a_stage_override_the_run(tmp_path):
    config = staged_settings(tmp_path / "run", {**GRPO, "eval": {"every": 3}}, LAST, model={"name": "m", "rank": 4})
    first, second = config.stage_config(1), config.stage_config(2, "tinker://x")
    assert (first.eval.every, second.eval.every) == (3, 4)
    assert (first.model.rank, second.model.load_from) == (4, "tinker://x")
    assert second.rewards == config.rewards
    assert (first.epochs, first.steps, second.epochs, second.steps) == (None, 5, 0.01, 0)
