"""A Python whose programs start with torch, the SDK and this package already imported.

Importing them takes four seconds of a core, and a test of the command line starts up to ten programs. A server process
imports them once and forks for each program (`tinsmith.processes.fork_server`); a client stands for the program in its
parent's view: it passes signals on, a killed client kills its program, and the client ends as the program ends. A test
needs the ordinary Python if it looks at the process itself (its imports, memory or children) or sets variables that
libraries read when imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def python(folder: Path) -> Iterator[str]:
    """The path of such a Python, in `folder`, for the duration of the block."""
    client = folder / "python"
    client.write_text(f"#!{sys.executable} -IS\n" + Path(__file__).with_name("client.py").read_text())
    client.chmod(0o755)
    command = [sys.executable, "-m", f"{__name__}.server", str(folder / "socket"), str(client)]
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # numpy's threads would not survive a fork
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=one_thread
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield str(client)
        finally:
            process.terminate()


@contextmanager
def in_place(path: str) -> Iterator[None]:
    """Programs that are started with sys.executable during the block are those of the Python at `path`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", path)
        yield
