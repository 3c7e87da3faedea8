"""Files of Trinity-RFT for tests: a small complete one, and helpers that set dotted keys in it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from tinsmith.dialects import RunFile, read_run

DATA = Path(__file__).parent / "data"
TINKER, VERL = DATA / "tinker.yaml", DATA / "verl.yaml"

SMALL: dict[str, Any] = {
    "name": "small",
    "checkpoint_root_dir": "out",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
    "model": {"model_path": "tiny", "max_prompt_tokens": 64, "max_response_tokens": 16, "tinker": {"enable": True}},
    "buffer": {
        "batch_size": 4,
        "total_steps": 3,
        "explorer_input": {"taskset": {"path": "openai/gsm8k"}, "default_workflow_type": "math_workflow"},
    },
}
"""A complete file, which tests modify."""


def with_key(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with a dotted key set; [] stands for the first entry of a list, * for any name."""
    values = copy.deepcopy(values)
    place: Any = values
    *parts, last = key.split(".")
    for part in parts:
        if part.endswith("[]"):
            entries = place.setdefault(part[:-2], [])
            if not entries:
                entries.append({})
            place = entries[0]
        else:
            place = place.setdefault("some" if part == "*" else part, {})
    place[last] = value
    return values


def write(folder: Path, values: dict[str, Any], name: str = "file.yaml") -> Path:
    """Write a file."""
    file = folder / name
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def read(folder: Path, *pairs: tuple[str, Any], values: dict[str, Any] | None = None) -> RunFile:
    """Read the small file with these keys set."""
    values = SMALL if values is None else values
    for key, value in pairs:
        values = with_key(values, key, value)
    return read_run(write(folder, values))
