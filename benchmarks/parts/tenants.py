"""What more tenants in a pass cost: cost should go by tokens and not by adapters.

A thousand tenants have adapters on a tiny model, where an adapter's own work is the largest share of a pass, and where
their weights, gradients and moments fit into the memory of one machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.comparison import Line, Setting, in_turns, rotate
from benchmarks.engine_driver import EngineDriver
from benchmarks.parts.memory import resident
from benchmarks.workloads import Batch, rows_of
from tests.models import VOCABULARY, save_model
from tinsmith.engine.base import LoraSpec, Pass
from tinsmith.service.budgets.models import model_bytes

RANK = 8
MANY, FEW, TOKENS = 1000, 64, 16
IDLE = 12


def measure(setting: Setting) -> list[Line]:
    """Eight tenants against one with as many rows; 64 tenants together against one after another; the memory of an
    idle one; 1,000 against 64.

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
    lines.append(_idle(setting))
    with tempfile.TemporaryDirectory() as folder:
        lines.append(_many(replace(setting, folder=save_model("aligned", Path(folder)))))
    return lines


def _idle(setting: Setting) -> Line:
    """Memory of a tenant between two of its steps: resident bytes of this process by the number of tenants."""
    ours, work = EngineDriver(setting), passes(rows_of(TOKENS, 2 * IDLE))
    levels = []
    for tenant, each in enumerate(work):
        ours.create(f"tenant-{tenant}", RANK, seed=tenant)
        ours.run(each)
        ours.step(each.model_id)
        ours.wait(ours.engine.release_memory())
        levels.append(resident() / 1e6)
    trained = model_bytes(LoraSpec(rank=RANK, seed=0), ours.engine.card) / 1e6
    ours.close()
    return Line(
        work=f"memory of an idle tenant of rank {RANK} after its first step",
        baseline="-",
        unit="MB",
        values=[(levels[at + IDLE] - levels[at]) / IDLE for at in range(IDLE // 2, IDLE)],
        note=f"{trained:.1f} MB are its weights, gradient and moments, the rest the weights that passes read, in "
        f"{setting.dtype}; the service evicts idle models to disk",
        lower=True,
    )


def _many(setting: Setting) -> Line:
    """Tokens/s of MANY tenants in one call against FEW, with a row of TOKENS each."""
    ours = EngineDriver(setting)
    for tenant in range(MANY):
        ours.create(f"tenant-{tenant}", RANK, seed=tenant)
    rows = rows_of(TOKENS, MANY)
    rows = Batch(name="", rows=[row % VOCABULARY for row in rows.rows], prompts=rows.prompts)
    work = {MANY: passes(rows), FEW: passes(rows)[:FEW]}

    def step() -> None:
        for each in work[MANY]:
            ours.step(each.model_id)

    ours.run(*work[MANY])
    step()
    seconds = rotate(
        {str(count): lambda count=count: ours.run(*work[count]) for count in work}, 5 * setting.turns, step
    )
    ours.close()
    speeds = {count: [count * TOKENS / each for each in seconds[str(count)]] for count in work}
    return Line(
        work=f"{MANY:,} tenants x one row of {TOKENS} tokens, rank {RANK}, tiny model: tokens/s",
        baseline=f"{FEW} such tenants",
        unit="x",
        least=0.9,
        aim=1.0,
        values=[many / few for many, few in zip(speeds[MANY], speeds[FEW], strict=True)],
        ours=f"{median(speeds[MANY]):,.0f} tokens/s",
        theirs=f"{median(speeds[FEW]):,.0f} tokens/s",
    )


def passes(rows: Batch) -> Sequence[Pass]:
    """Each row as a tenant's own request."""
    return [
        Batch(name="", rows=[row], prompts=[prompt]).as_pass(f"tenant-{tenant}")
        for tenant, (row, prompt) in enumerate(zip(rows.rows, rows.prompts, strict=True))
    ]
