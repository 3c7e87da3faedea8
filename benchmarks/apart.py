"""Measurements in processes of their own, each with a time limit, so that one that fails takes no other with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended."""

    result: str | None
    """What it has written; None if it has written nothing, or not to the end."""
    seconds: float
    error: str = ""
    """Why there is no result."""
    log: str = ""
    """What it has written to standard error, if that was captured."""


def run_apart(
    command: Callable[[Path], Sequence[str]],
    limit_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    captures: bool = False,
) -> Ending:
    """Run a program that writes its result into a file. After the limit it is killed, with all processes that it has
    started. `captures`: keep its standard error, in place of showing it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result"
        child = subprocess.Popen(
            command(file),
            env=environment,
            stdout=sys.stderr,
            stderr=subprocess.PIPE if captures else None,
            text=True,
            start_new_session=True,
        )
        try:
            _, log = child.communicate(timeout=limit_s)
            error = f"the process ended with exit status {child.returncode}" if child.returncode else ""
        except BaseException as reason:
            os.killpg(child.pid, signal.SIGKILL)
            _, log = child.communicate()
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
            error = f"the process was killed after its limit of {limit_s:.0f} s"
        result = file.read_text() if file.is_file() else None
    if result is None and not error:
        error = "the process ended without a result"
    return Ending(result=result, seconds=time.monotonic() - began, error=error, log=log or "")
