"""Rewards of the run files of this folder, as a user writes them."""

from __future__ import annotations

import json

from tinsmith import Rollout, Task, reward

KINDS = ("animal", "country", "fruit", "instrument", "sport")


@reward("kind")
def kind(task: Task, rollout: Rollout) -> float:
    """1 if the right kind, and no other, is in the reply."""
    return float([name for name in KINDS if name in rollout.text.lower()] == [task.answer])


@reward("record")
def record(task: Task, rollout: Rollout) -> float:
    """A quarter for a JSON object in the reply, and one for each of its three fields that is right."""
    text = rollout.text
    try:
        answer = json.loads(text[text.find("{") : text.rfind("}") + 1])
    except ValueError:
        return 0.0
    if not isinstance(answer, dict):
        return 0.0
    expected = json.loads(task.answer)
    return (1 + sum(answer.get(key) == value for key, value in expected.items())) / (1 + len(expected))


@reward("same")
def same(task: Task, rollout: Rollout) -> float:
    """1 if the reply is the answer."""
    return float(rollout.text.strip() == task.answer)
