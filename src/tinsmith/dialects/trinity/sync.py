"""Trinity's synchronizer as `sync` and `staleness` of ours, and how rollouts are tried.

Interval and offset mean the same here: with interval i and offset o, batch k is sampled by the weights of step
floor((k - 1 - o) / i) i. Without a method, weights are handed over in memory by one process, as checkpoints by two.
"""

from __future__ import annotations

from tinsmith.dialects.base import Becoming, idle
from tinsmith.dialects.trinity.algorithm import SUPERVISED
from tinsmith.dialects.trinity.schema import TrinityFile

STYLES = {
    "fixed": "fixed",
    "explorer_driven": "on_demand",
    "trainer_driven": "on_publish",
    "fully_async": "live",
}
PUBLISHING = ("trainer_driven", "fully_async")
"""Styles in which training hands weights over at times of its own."""


def translate(file: TrinityFile, becoming: Becoming) -> None:
    """`sync`, `staleness` and `rollout`."""
    sync = file.synchronizer
    _tries(file, becoming)
    if file.algorithm.algorithm_type in SUPERVISED:
        becoming.settings.pop("sync", None)
        why = f"{file.algorithm.algorithm_type} learns from data, so nothing is sampled to learn from."
        idle(sync, becoming, "synchronizer.", why)
        return
    _intervals(file, becoming)
    if sync.sync_offset < 0:
        becoming.fault("synchronizer.sync_offset", f"{sync.sync_offset} is below 0.", "Set 0 or more.")
    becoming.put("sync.style", STYLES[sync.sync_style])
    if sync.sync_style == "fully_async":
        becoming.put("sync.in_flight", file.explorer.max_inflight_batches)
        if sync.sync_offset:
            becoming.note(
                "synchronizer.sync_offset: in sync_style fully_async, capacity says how far sampling runs ahead."
            )
    else:
        becoming.put("staleness", max(0, sync.sync_offset))
        if "max_inflight_batches" in file.explorer.model_fields_set:
            becoming.note("explorer.max_inflight_batches: it counts only in sync_style fully_async.")
    if sync.sync_method == "checkpoint":
        becoming.put("sync.method", "checkpoint")
    if sync.sync_timeout <= 0:
        becoming.fault("synchronizer.sync_timeout", f"{sync.sync_timeout} seconds are none.", "Set 1 or more.")


def _intervals(file: TrinityFile, becoming: Becoming) -> None:
    sync = file.synchronizer
    sampling = sync.sync_interval if sync.explorer_sync_interval is None else sync.explorer_sync_interval
    training = sync.sync_interval if sync.trainer_sync_interval is None else sync.trainer_sync_interval
    given = {
        "sync_interval": sync.sync_interval,
        "explorer_sync_interval": sampling,
        "trainer_sync_interval": training,
    }
    wrong = [(key, value) for key, value in given.items() if value < 1 and key in sync.model_fields_set]
    for key, value in wrong:
        becoming.fault(f"synchronizer.{key}", f"{value} is no interval.", "Set 1 or more.")
    if wrong:
        return
    becoming.put("sync.interval", sampling)
    if sync.sync_style in PUBLISHING:
        if training != sampling:
            becoming.put("sync.publish_every", training)
    elif training != sampling and sync.sync_style == "fixed":
        what = f"sampling waits for weights every {sampling} steps, and training gives them every {training}."
        becoming.fault("synchronizer.trainer_sync_interval", what, "Make them alike, or take another sync_style.")
    elif training != sampling:
        becoming.note("synchronizer.trainer_sync_interval: in sync_style explorer_driven, sampling says when.")


def _tries(file: TrinityFile, becoming: Becoming) -> None:
    explorer = file.explorer
    over, limit = explorer.over_rollout, explorer.dynamic_timeout
    if not 0 <= over.ratio < 1:
        becoming.fault("explorer.over_rollout.ratio", f"{over.ratio} is no share.", "Set 0 or more, and less than 1.")
    if file.synchronizer.sync_style == "fixed" and (over.ratio or over.return_partial_tasks):
        cure = "Set synchronizer.sync_style: explorer_driven or trainer_driven, or leave over_rollout out."
        becoming.fault("explorer.over_rollout", "sync_style fixed waits for every task.", cure)
    if over.ratio:
        becoming.put("rollout.over.wait", over.wait_after_min)
        becoming.put("rollout.over.partial", over.return_partial_tasks)
    elif "wait_after_min" in over.model_fields_set:
        becoming.note("explorer.over_rollout.wait_after_min: it counts only with a ratio above 0.")
    becoming.put("rollout.partial", "keep" if over.return_partial_tasks else "drop")
    if limit.enable:
        becoming.put("rollout.timeout_ratio", limit.ratio)
        becoming.put("rollout.timeout_warmup", limit.warmup_min_steps)
    elif limit.model_fields_set - {"enable"}:
        becoming.note("explorer.dynamic_timeout: it counts only with enable: true.")
