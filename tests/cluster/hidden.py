"""Machines that do not see the data folder: a Python whose processes run in mount namespaces of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.engine.processes.slots import Slot, read_file

HIDES = ["unshare", "--user", "--map-root-user", "--mount"]
MACHINES = 2


@dataclass(frozen=True, slots=True)
class BlindPython:
    """A Python whose processes find an empty folder in the place of the data folder."""

    path: str
    caches: tuple[Path, ...] = ()
    """The caches of the machines, as this process sees them."""


def can_hide() -> bool:
    """Whether this system lets processes have mount namespaces."""
    return subprocess.run([*HIDES, "true"], capture_output=True, check=False).returncode == 0


def blind_python(folder: Path, data: Path, cache: Path | None = None) -> BlindPython:
    """Write such a program for the data folder `data`.

    With `cache`, each process is on one of MACHINES machines, which have that folder each for itself: a process that is
    started after another may find nothing of what that one had there.
    """
    mounts = [f"mount -t tmpfs none {data}"]
    caches = tuple(folder / "machines" / str(number) for number in range(MACHINES if cache is not None else 0))
    for each in caches:
        each.mkdir(parents=True)
    if cache is not None:
        cache.mkdir()
        mounts.append(f"mount --bind {folder}/machines/$(($$ % {MACHINES})) {cache}")
    inner = " && ".join([*mounts, f'exec {sys.executable} "$@"'])
    python = folder / "blind-python"
    python.write_text(f"#!/bin/sh\nexec {' '.join(HIDES)} sh -c '{inner}' sh \"$@\"\n")
    python.chmod(0o755)
    return BlindPython(str(python), caches)


def blind(run: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The method `run` of a slot whose machine reads no file of this one."""

    async def run_blind(slot: Slot, function: Any, *args: Any, **options: Any) -> Any:
        return None if function is read_file else await run(slot, function, *args, **options)

    return run_blind
