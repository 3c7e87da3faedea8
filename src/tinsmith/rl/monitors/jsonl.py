"""A run as files: a row of metrics for each step, and every rollout. Always on; the report is made from them.

metrics.jsonl has one JSON object a line, written through at once, so that others may follow it while the run goes on.
rollouts/train-000012.jsonl has a line for each rollout of step 12, rollouts/eval-000012.jsonl for each of the
evaluation after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith.rl.monitors.base import Kind, RunInfo
from tinsmith.rl.types import Group, Rollout


class JsonlMonitor:
    """Appends to what an earlier process of the same run wrote."""

    def __init__(self, info: RunInfo) -> None:
        self._folder = info.folder / "rollouts"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._metrics = (info.folder / "metrics.jsonl").open("a", buffering=1, encoding="utf-8")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One line."""
        self._metrics.write(json.dumps({"step": step, **values}) + "\n")

    def rollouts(self, step: int, kind: Kind, groups: Sequence[Group]) -> None:
        """One file; written again where a step is done again."""
        with (self._folder / f"{kind}-{step:06}.jsonl").open("w", encoding="utf-8") as file:
            for group in groups:
                for index, rollout in enumerate(group.rollouts):
                    file.write(json.dumps(_line(step, group, index, rollout), ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Closes the metrics file."""
        self._metrics.close()


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """One row for each step so far, oldest first; training and evaluation of a step are joined."""
    file = folder / "metrics.jsonl"
    rows: dict[int, dict[str, float]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def _line(step: int, group: Group, index: int, rollout: Rollout) -> dict[str, Any]:
    task = group.task
    return {
        "step": step,
        "version": group.version,
        "task": task.id,
        "index": index,
        "messages": [{"role": message.role, "content": message.content} for message in task.messages],
        "answer": task.answer,
        "text": rollout.text,
        "reward": rollout.reward,
        "reward_parts": dict(rollout.reward_parts),
        "error": rollout.error,
        "turns": [
            {
                "role": turn.role,
                "text": turn.text,
                "stop": turn.stop,
                "version": turn.version,
                "prompt": turn.prompt,
                "tokens": turn.tokens,
                "logprobs": turn.logprobs,
            }
            for turn in rollout.turns
        ],
    }
