"""Some rollouts of a step as the rows of a table, for trackers with the setting `rollouts`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tinsmith.chat.strict_json import encodable
from tinsmith.rl.record.layout import Kind
from tinsmith.rl.types import Group

COLUMNS = (
    "rollout", "step", "task", "group", "index", "reward", "correct", "tokens", "termination", "prompt", "reply",
    "error",
)  # fmt: skip
_CHARACTERS = 10_000
"""Longest text in a table; the files of the run folder have all of it."""


def rollout_rows(step: int, kind: Kind, groups: Sequence[Group], count: int) -> list[list[Any]]:
    """Rows of the first `count` rollouts, in the order of `COLUMNS`."""
    rollouts = [(number, group, at) for number, group in enumerate(groups) for at in range(len(group.rollouts))]
    rows = []
    for line, (number, group, index) in enumerate(rollouts[:count]):
        rollout = group.rollouts[index]
        reward = float(rollout.reward) if math.isfinite(rollout.reward) else None
        prompt = "\n".join(f"{message.role}: {message.content}" for message in group.task.messages)
        row = [
            f"{kind}-{step}-{line}", step, group.task.id, number, index, reward, rollout.correct,
            rollout.sampled_tokens, rollout.termination, prompt, rollout.text, rollout.error,
        ]  # fmt: skip
        rows.append([encodable(value[:_CHARACTERS]) if isinstance(value, str) else value for value in row])
    return rows
