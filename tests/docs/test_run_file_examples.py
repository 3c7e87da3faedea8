"""The run-file examples of the guides are valid, each on top of a small run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinsmith.rl.config import RunConfig

GUIDES = Path(__file__).parents[2] / "docs" / "train"
NAMES = ("run-files", "data", "steps", "evaluation", "algorithms", "watching")
BASE: dict[str, Any] = {
    "model": {"name": "m"},
    "tasks": {"train": {"type": "addition"}, "eval": {"sums": {"type": "addition"}, "gsm8k": {"type": "addition"}}},
    "rewards": [{"type": "closeness"}],
    "steps": 3,
}
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in NAMES
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", (GUIDES / f"{name}.md").read_text(), re.DOTALL), 1)
    if "plugins:" not in block and "my_" not in block  # files of the reader; test_advantage_example.py
]


def examples_of(block: str) -> list[dict[str, Any]]:
    """One mapping for each run file in a block: lines that repeat a key are files of their own."""
    lines = block.splitlines()
    if len({line.partition(":")[0] for line in lines}) == 1 and len(lines) > 1:
        return [yaml.safe_load(line) for line in lines]
    return [yaml.safe_load(block)]


def whole(example: dict[str, Any]) -> dict[str, Any]:
    """The example in its place in a run file."""
    if "operators" in example:
        example = {"train": {"type": "jsonl", "path": "rows.jsonl", **example}}
    if "train" in example:
        example = {"tasks": example}
    return {**BASE, **example}


@pytest.mark.parametrize("block", BLOCKS)
def test_example_of_a_guide_is_valid(block):
    for example in examples_of(block):
        values = whole(example)
        if values.get("algorithm", {}).get("type") == "ppo":
            values["group_size"] = 1
        assert RunConfig.model_validate(values)


def test_guides_have_examples():
    assert len(BLOCKS) > 8
