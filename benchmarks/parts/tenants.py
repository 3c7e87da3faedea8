"""What more tenants in a pass cost: cost should go by tokens and not by adapters."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.comparison import Line, Setting, in_turns
from benchmarks.engine_driver import EngineDriver
from benchmarks.workloads import Batch, rows_of
from tinsmith.engine.base import Pass

RANK = 8


def measure(setting: Setting) -> list[Line]:
    """Eight tenants against one with as many rows; 64 tenants together against one after another.

    Passes alone are timed. Between them each tenant steps, as it would: a pass finds no gradient of an earlier one.
    """
    ours = EngineDriver(setting)
    for tenant in range(64):
        ours.create(f"tenant-{tenant}", RANK, seed=tenant)
    rows, short = rows_of(128, 8), rows_of(16, 64)
    single, eight, many = rows.as_pass("tenant-0"), passes(rows), passes(short)

    def separately() -> None:
        for each in many:
            ours.run(each)

    def step() -> None:
        for each in many:
            ours.step(each.model_id)

    turns = 3 * setting.turns
    lines = [
        in_turns(lambda: ours.run(*eight), lambda: ours.run(single), turns, between=step).line(
            f"8 tenants x one row of 128, rank {RANK}", "one tenant with 8 x 128", 0.95, 1.0, rows.tokens
        ),
        in_turns(lambda: ours.run(*many), separately, setting.turns, between=step).line(
            f"64 tenants x one row of 16 tokens, rank {RANK}", "64 separate passes", 3.0, 6.0, short.tokens
        ),
    ]
    ours.close()
    return lines


def passes(rows: Batch) -> Sequence[Pass]:
    """Each row as a tenant's own request."""
    return [
        Batch(name="", rows=[row], prompts=[prompt]).as_pass(f"tenant-{tenant}")
        for tenant, (row, prompt) in enumerate(zip(rows.rows, rows.prompts, strict=True))
    ]
