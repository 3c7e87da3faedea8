"""Rewards and workflows that misbehave: with the reply `yes`, each does what its name says."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from tinsmith.rl.types import Rollout, Task


def _bad(act: Callable[[], Any]) -> Callable[[Task, Rollout], Any]:
    return lambda task, rollout: act() if rollout.text == "yes" else 0.25


def _raises(make: Callable[[], BaseException]) -> Callable[[Task, Rollout], Any]:
    def act() -> None:
        raise make()

    return _bad(act)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


raises = _raises(lambda: ValueError("bad luck"))
raises_a_novel = _raises(lambda: ValueError("x" * 10_000_000))
raises_unprintable = _raises(Unprintable)
exits = _raises(lambda: SystemExit(3))
interrupts = _raises(KeyboardInterrupt)
cancels = _raises(asyncio.CancelledError)
groups = _raises(lambda: BaseExceptionGroup("several", [SystemExit(1), ValueError("x")]))
returns_none = _bad(lambda: None)
returns_text = _bad(lambda: "1.0")
returns_complex = _bad(lambda: 1j)
returns_nan = _bad(lambda: float("nan"))
returns_infinity = _bad(lambda: {"part": np.inf})
returns_array = _bad(lambda: np.ones(3))
returns_huge = _bad(lambda: 10**400)
calls_sys_exit = _bad(lambda: sys.exit("done"))
closes_the_loop = _bad(lambda: asyncio.get_running_loop().close())
blocks = _bad(lambda: time.sleep(60))


def spins(task: Task, rollout: Rollout) -> float:
    """Loops in Python, and catches every Exception."""
    while rollout.text == "yes":
        with suppress(Exception):
            sum(range(1000))
    return 0.25


def stops_the_loop(task: Task, rollout: Rollout) -> float:
    asyncio.get_running_loop().stop()
    return 0.25


async def exits_in_a_task(task: Task, rollout: Rollout) -> float:
    async def leave() -> None:
        sys.exit(5)

    await asyncio.wait({asyncio.create_task(leave())})
    return 0.25


def changes_the_folder(task: Task, rollout: Rollout) -> float:
    os.chdir("/")
    return 0.25


def ignores_ctrl_c(task: Task, rollout: Rollout) -> float:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return 0.25


def floods(task: Task, rollout: Rollout) -> float:
    sys.stdout.write("noise " * 100_000)
    sys.stderr.write("\x1b[2J\0" * 1000)
    return 0.25


def leaves_the_process(task: Task, rollout: Rollout) -> float:
    os._exit(7)


def leaks(task: Task, rollout: Rollout) -> float:
    bytearray(8 << 30)
    return 0.25


def leaves_by_sys_exit(task: Task, rollout: Rollout) -> float:
    sys.exit(3)


def hangs(task: Task, rollout: Rollout) -> float:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def half(task: Task, rollout: Rollout) -> float:
    return 0.5


async def never_ends(task: Task, conversation: Any) -> float:
    """Catches its own cancellation."""
    reply = await conversation.say(*task.messages)
    while reply.text == "yes":
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
    return 0.25
