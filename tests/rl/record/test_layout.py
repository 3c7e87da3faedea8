"""The files of a run folder have their names from one module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tinsmith
from tinsmith.rl.record import layout
from tinsmith.rl.record.layout import Layout, explore_part

PACKAGE = Path(tinsmith.__file__).parent
FILES = {path.name for name, path in vars(Layout(Path("run"))).items() if name != "path"}


def names_in(file: Path) -> set[str]:
    """Names of files in expressions of a module that make paths or open them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            names.add(str(node.right.value))
    return (names & FILES) - {"wandb"}  # Weights & Biases has folders of this name elsewhere too


def test_no_other_module_names_the_files():
    modules = [file for file in (PACKAGE / "rl").rglob("*.py") if file != Path(layout.__file__)]
    places = {str(file.relative_to(PACKAGE)): names_in(file) for file in modules}
    assert {place: names for place, names in places.items() if names} == {}


def test_parts_have_files_of_the_same_names():
    run = Layout(Path("runs/demo"))
    assert run.part("").path == run.path
    assert run.part(explore_part("b")).metrics == Path("runs/demo/explore-b/metrics.jsonl")
    assert run.stage(2, "grpo") == Path("runs/demo/02-grpo")


def test_steps_with_rollouts_are_in_order(tmp_path: Path):
    run = Layout(tmp_path)
    run.rollouts_folder.mkdir()
    for step in (1_000_000, 12, 2):
        run.rollouts("train", step).touch()
    run.rollouts("eval", 3).touch()
    assert run.steps_with_rollouts("train") == [2, 12, 1_000_000]
    assert run.steps_with_rollouts("eval") == [3]


@pytest.mark.parametrize("kind", ["state", "checkpoint"])
def test_states_are_found_by_their_names(tmp_path: Path, kind: str):
    run = Layout(tmp_path)
    run.checkpoints_folder.mkdir()
    file = run.state if kind == "state" else run.checkpoint(10)
    file.touch()
    assert run.checkpoints() == ([] if kind == "state" else [tmp_path / "checkpoints" / "step-000010.json"])
