"""Files of Trinity-RFT as tests write them: a small whole one, and values laid into it at dotted keys."""

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
"""A whole file: every test changes a little of it."""

LISTS = ("lora_configs", "tasksets", "eval_tasksets", "auxiliary_models", "operators")


def laid(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with the value at a dotted key; [] after a part is the first place of a list, * any name."""
    found = copy.deepcopy(values)
    place: Any = found
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
    return found


def wrote(folder: Path, values: dict[str, Any], name: str = "file.yaml") -> Path:
    """The file."""
    file = folder / name
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def read(folder: Path, *pairs: tuple[str, Any], values: dict[str, Any] | None = None) -> RunFile:
    """The small file with these keys, as it is read."""
    found = SMALL if values is None else values
    for key, value in pairs:
        found = laid(found, key, value)
    return read_run(wrote(folder, found))
