"""Batches as JSON, in buffers and in state.json. Reads the form of version 0.1.0 too, whose rollouts had one role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter

from tinsmith.rl.rollouts.progress import Batch
from tinsmith.rl.types import POLICY


def _current_form(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    groups = [
        {**group, "rollouts": [_current_rollout(rollout) for rollout in group["rollouts"]]}
        for group in values.get("groups", ())
    ]
    return {**values, "groups": groups}


def _current_rollout(values: Any) -> Any:
    """A rollout with trajectories, from one that lists `turns` with roles and `rewards` by role."""
    if not isinstance(values, Mapping) or "turns" not in values:
        return values
    rest = {key: value for key, value in values.items() if key not in ("turns", "rewards")}
    turns = [{key: value for key, value in turn.items() if key != "role"} for turn in values["turns"]]
    return {**rest, "trajectories": [{"turns": turns, "reward": values.get("rewards", {}).get(POLICY, 0.0)}]}


StoredBatch = Annotated[Batch, BeforeValidator(_current_form)]
"""A batch that is read from JSON."""

BATCH: TypeAdapter[Batch] = TypeAdapter(StoredBatch)
"""Reads and writes a batch as JSON."""
