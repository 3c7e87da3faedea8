"""Keys at the top of a run file that other keys of it leave unread: each is refused, with the reason.

Leaves out keys of one section that go with each other: their settings classes check those (`settings.unread`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinsmith.rl.algorithms.presets import LESSONS
from tinsmith.settings import changed

if TYPE_CHECKING:
    from tinsmith.rl.config import RunConfig, Stage

_OF_ROLLOUTS = ("group_size", "staleness", "sync", "buffer", "filters", "filter_refills")


def check(run: RunConfig) -> None:
    """Raises ValueError for the first such key of a run without stages."""
    given = changed(run)
    if not run.rolls_out and (idle := [name for name in _OF_ROLLOUTS if name in given]):
        raise ValueError(f"{idle[0]} is about rollouts, and {run.algorithm.type} learns from data alone; leave it out")
    if run.filter_refills and not run.filters:
        raise ValueError("filter_refills refills what filters leave out; give filters, as {type: reward_std}")
    _check_style(run)


def _check_style(run: RunConfig) -> None:
    if run.sync.style == "fixed" and run.rollout.over.ratio:
        raise ValueError("rollout.over wants another sync.style than fixed, whose batches are the same in every run")
    if run.sync.publish_every is not None and run.sync.style not in ("on_publish", "live"):
        raise ValueError(f"sync.publish_every means nothing with sync.style {run.sync.style}; set sync.interval")
    if run.sync.style == "live" and run.staleness:
        raise ValueError(
            "staleness means nothing with sync.style live, which takes newer weights at once; "
            "set buffer.capacity for how far sampling may run ahead"
        )
    if run.sync.style == "fixed" and "capacity" in changed(run.buffer):
        raise ValueError(
            "buffer.capacity means nothing with sync.style fixed, where staleness says how far sampling runs ahead"
        )


def check_stages(stages: Sequence[Stage], modes: Sequence[str]) -> None:
    """Raises ValueError for a stage that would keep moments that there are none of."""
    trains = [mode != "bench" for mode in modes]
    for at, stage in enumerate(stages):
        if stage.keep_optimizer and not (trains[at] and any(trains[:at])):
            why = "no stage trains before it" if trains[at] else "mode bench trains nothing"
            raise ValueError(f"stage {stage.name}: {why}, so there is no optimizer to keep; leave out keep_optimizer")


def of_stage(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What the whole run says to a stage that has `own` beside: of rollouts nothing, where the stage has none."""
    algorithm = own.get("algorithm", values.get("algorithm"))
    kind = algorithm.get("type") if isinstance(algorithm, Mapping) else None
    return {name: part for name, part in values.items() if not (kind in LESSONS and name in _OF_ROLLOUTS)}
