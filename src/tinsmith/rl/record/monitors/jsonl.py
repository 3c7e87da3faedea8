"""Metrics and rollouts of a run as JSON lines in the run folder. Always on; the report reads these files.

metrics.jsonl has a JSON object per line, flushed after each line, so that it can be followed during the run.
rollouts/train-000012.jsonl has a line per rollout of step 12; rollouts/eval-000012.jsonl has those of the evaluation
after step 12. A line has the messages of the task, and for each turn, as `input`, the text that was sent before the
reply: what the workflow, the chat template and the environment made of them. Of each sampled token there are its id,
text, logprob, and, if it was trained on, the trainer's logprob and the advantage. Numbers that JSON has not are null.
Rows of the rollouts are in an index too (history/index.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from typing_extensions import override

from tinsmith.chat.strict_json import encode_json
from tinsmith.rl.history.index import RolloutIndex
from tinsmith.rl.record.layout import Kind, Layout
from tinsmith.rl.record.monitors.base import Monitor, RunInfo
from tinsmith.rl.types import Group, Message, Rollout, Trajectory, Turn

_PROMPTS = 256
"""Decoded prompts to keep."""


class JsonlMonitor(Monitor):
    """Writes metrics.jsonl and rollouts/. A resumed run appends to metrics.jsonl."""

    def __init__(self, info: RunInfo) -> None:
        self._layout = Layout(info.folder)
        self._layout.rollouts_folder.mkdir(parents=True, exist_ok=True)
        self._decode = lru_cache(_PROMPTS)(info.decode) if info.decode else None  # rollouts of a task share prompts
        self._token_text = lru_cache(None)(info.token_text) if info.token_text else None
        self._metrics = self._layout.metrics.open("a", buffering=1, encoding="utf-8")

    @override
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._metrics.write(encode_json({"step": step, **_floats(values)}, compact=False) + "\n")

    @override
    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        """Write the file of a step, over that of an earlier process that did not complete the step."""
        target = self._layout.rollouts(kind, step)
        temporary = target.with_suffix(".part")
        lines: list[tuple[int, int, dict[str, Any]]] = []
        with temporary.open("wb") as file:
            for number, group in enumerate(groups):
                for index, rollout in enumerate(group.rollouts):
                    record = self._line(step, number, group, index, rollout)
                    line = encode_json(record, compact=False).encode() + b"\n"
                    lines.append((file.tell(), len(line), record))
                    file.write(line)
        temporary.replace(target)
        RolloutIndex(self._layout).add(kind, step, lines)

    @property
    @override
    def required(self) -> bool:
        return True

    @override
    def close(self) -> None:
        self._metrics.close()

    def _line(self, step: int, number: int, group: Group, index: int, rollout: Rollout) -> dict[str, Any]:
        task = group.task
        return {
            "step": step,
            "version": group.version,
            "task": f"{task.environment}/{task.id}" if task.environment else task.id,
            "environment": task.environment,
            "group": number,
            "index": index,
            "messages": [_message(message) for message in task.messages],
            "answer": task.answer,
            "text": rollout.text,
            "reward": _number(rollout.reward),
            "reward_parts": _floats(rollout.reward_parts),
            "correct": rollout.correct,
            "metrics": _floats(rollout.metrics),
            "termination": rollout.termination,
            "error": rollout.error,
            "trajectories": [self._trajectory(each) for each in rollout.trajectories],
        }

    def _trajectory(self, trajectory: Trajectory) -> dict[str, Any]:
        return {
            "role": trajectory.role,
            "reward": _number(trajectory.reward),
            "trained": trajectory.trained,
            "turns": [
                {
                    "input": self._input(before, turn),
                    "text": turn.text,
                    "stop": turn.stop,
                    "model": turn.model,
                    "version": turn.version,
                    "reward": None if turn.reward is None else _number(turn.reward),
                    "prompt": turn.prompt,
                    "tokens": turn.tokens,
                    "token_texts": [self._token_text(each) for each in turn.tokens] if self._token_text else None,
                    "logprobs": [_number(p) for p in turn.logprobs],
                    "trainer_logprobs": [_number(p) for p in turn.trainer_logprobs] or None,
                    "advantages": _advantages(turn),
                }
                for before, turn in zip((None, *trajectory.turns), trajectory.turns, strict=False)
            ],
        }

    def _input(self, before: Turn | None, turn: Turn) -> str | None:
        """The text that was sent: of a turn that continues the one before, what was added; None without a tokenizer."""
        if self._decode is None or (turn.model and not turn.model.startswith("tinker://")):
            return None
        start = (*before.prompt, *before.tokens) if before else ()
        begin = len(start) if turn.prompt[: len(start)] == start else 0
        return self._decode(turn.prompt[begin:])


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Read the metrics of a run folder: a row per step, in order; training and evaluation of a step are joined. What is
    no number is left out.

    Example: [row["reward/mean"] for row in read_metrics(Path("runs/demo"))]
    """
    file = Layout(folder).metrics
    rows: dict[int, dict[str, float]] = {}
    for line in file.read_bytes().split(b"\n") if file.exists() else ():
        with suppress(ValueError, TypeError, LookupError, AttributeError):  # a line being written, or no row
            row = json.loads(line)
            numbers = {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}
            rows.setdefault(int(numbers["step"] or 0), {}).update(read_floats(numbers))
    return [rows[step] for step in sorted(rows)]


def read_rollouts(file: Path) -> list[dict[str, Any]]:
    """Read the rollouts of a step."""
    rows = [json.loads(line) for line in file.read_bytes().split(b"\n") if line]
    return [{**row, **read_floats({"reward": row["reward"]})} for row in rows]


def read_floats(values: Mapping[str, float | None]) -> dict[str, float]:
    """Numbers of a line, with NaN for null."""
    return {name: math.nan if value is None else value for name, value in values.items()}


def _message(message: Message) -> dict[str, Any]:
    images = {"images": len(message.images)} if message.images else {}
    return {**_json_values(message.more), "role": message.role, "content": message.content, **images}


def _json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that JSON can hold."""
    held: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(TypeError, ValueError):
            held[str(name)] = json.loads(encode_json(value))
    return held


def _advantages(turn: Turn) -> float | list[float | None] | None:
    """The advantage of all tokens, or that of each."""
    if turn.advantages is None or isinstance(turn.advantages, int | float):
        return None if turn.advantages is None else _number(turn.advantages)
    return [_number(value) for value in turn.advantages]


def _floats(values: Mapping[str, float]) -> dict[str, float | None]:
    """The values of workflows and rewards, which may be integers or numbers of numpy, as they are after a resume."""
    return {name: _number(value) for name, value in values.items()}


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
