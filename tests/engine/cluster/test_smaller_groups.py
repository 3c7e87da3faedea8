"""Groups of fewer training processes, for when machines are lost for good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tinsmith.engine.cluster.cluster import ModelCluster
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.slots import LocalSlots


@pytest.mark.parametrize(
    ("slots", "least", "deterministic", "trainers"),
    [(3, 1, False, 3), (3, 1, True, 2), (1, 1, True, 1), (3, 3, True, None), (1, 2, False, None), (0, 1, True, None)],
)
def test_smaller_group_has_the_same_shards(slots: int, least: int, deterministic: bool, trainers: int | None) -> None:
    smaller = ClusterConfig(trainers=4, min_trainers=least).group_on(slots, deterministic=deterministic)
    assert (smaller and smaller.trainers) == trainers
    if smaller is not None and deterministic:
        assert smaller.shards_of_rows(deterministic=True) == 8


@pytest.mark.parametrize(
    ("placed", "least", "names"),
    [
        ("yyyy", 2, ["trainer-0", "trainer-1", "trainer-2", "trainer-3"]),
        ("nyyy", 2, ["trainer-1", "trainer-2"]),
        ("nnny", 2, ["trainer-0", "trainer-1", "trainer-2", "trainer-3"]),  # too few: waits for all
        ("nyyy", 0, ["trainer-0", "trainer-1", "trainer-2", "trainer-3"]),
    ],
)
def test_group_takes_the_slots_that_have_a_machine(
    placed: str, least: int, names: Sequence[str], wait: Any, tmp_path: Path
) -> None:
    """Fails if `_group` cuts slots without regard to `has_machine`."""

    class Slot:
        def __init__(self, number: int) -> None:
            self.name = f"trainer-{number}"

        async def has_machine(self) -> bool:
            return placed[int(self.name[-1])] == "y"

    config = EngineConfig(source="toy", deterministic=True)
    cluster = ModelCluster(config, ClusterConfig(trainers=4, min_trainers=least), LocalSlots(), tmp_path)
    cluster._trainer_slots = [Slot(number) for number in range(4)]  # type: ignore[misc]
    slots, settings = wait(cluster._group())
    assert [slot.name for slot in slots] == names
    assert settings.trainers == len(names)
