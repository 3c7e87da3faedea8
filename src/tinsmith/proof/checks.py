"""The checks of `tinsmith prove`, each with what it compared and whether it held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tinsmith.proof.work import Address, Company, Record, run_work

MAX_MISMATCH = 1e-3
"""Largest difference between the logprobs of sampler and trainer in float32, which sum in different orders."""
MAX_MISMATCH_BFLOAT16 = 0.15


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the certificate."""

    name: str
    passed: bool
    result: str


def prove(address: Address, dtype: str, restart: Callable[[], None] | None) -> Iterator[Check]:
    """Run the checks, one after the other. `restart` kills the server and starts it again; None if that may not be."""
    alone = run_work(address)
    yield _mismatch(alone, MAX_MISMATCH if dtype == "float32" else MAX_MISMATCH_BFLOAT16)
    yield _equal("the same seeds again", alone, run_work(address))
    with Company(address):
        yield _equal("in company of other clients", alone, run_work(address))
    if restart is not None:
        kill = restart

        def kill_every_second_step(step: int) -> None:
            if step % 2:
                kill()

        yield _equal("killed twice and continued", alone, run_work(address, kill_every_second_step))


def _mismatch(record: Record, limit: float) -> Check:
    worst = float(np.abs(np.subtract(record.sampled_logprobs, record.trained_logprobs)).max())
    result = f"largest difference {worst:.1e} of {len(record.tokens)} logprobs, limit {limit:g}"
    return Check("sampler against trainer", worst <= limit, result)


def _equal(name: str, expected: Record, actual: Record) -> Check:
    differences = expected.differences(actual)
    if not differences:
        return Check(name, True, f"{len(expected)} numbers equal to the last bit")
    return Check(name, False, f"not equal to the last bit: {', '.join(differences)}")
