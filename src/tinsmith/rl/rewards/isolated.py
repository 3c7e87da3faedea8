"""Rewards of users in a worker process: what runs there. The process may hang, leak memory or end."""

from __future__ import annotations

import asyncio
from typing import Any

from tinsmith.rl.plugins import await_if_needed, import_object
from tinsmith.rl.rewards.base import Score
from tinsmith.rl.types import Rollout, Task


def score(path: str, args: dict[str, Any], task: Task, rollout: Rollout) -> dict[str, Any]:
    """The score of a rollout by the function, or by an instance of the class, at an import path."""
    target = import_object(path)
    call, more = (target(**args), {}) if isinstance(target, type) else (target, args)
    result = call(task, rollout, **more)
    value = Score.of(asyncio.run(await_if_needed(result)))
    return {"value": value.value, "correct": value.correct, "parts": dict(value.parts)}
