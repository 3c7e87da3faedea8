"""The `tinker` command in subprocesses.

Importing the SDK takes seconds, so a server process imports it once and forks for each command. Run as a module, this
file reads a call from each line of standard input and writes a line with the exit status and the output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


class Tinker:
    """Runs `tinker` commands."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, *words: str, cwd: Path | None = None, stdin: str = "") -> CommandResult:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        call = {"words": words, "cwd": str(cwd or "."), "stdin": stdin}
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return CommandResult(**json.loads(self._process.stdout.readline()))

    def json(self, *words: str, **more: Any) -> Any:
        return self("--format", "json", *words, **more).json


@contextmanager
def tinker_command(python: str = "", **environment: str) -> Iterator[Tinker]:
    """Run the server process with these environment variables, by a Python other than this one if it is given."""
    process = subprocess.Popen(
        [python or sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Tinker(process)
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def main() -> None:
    import tinker  # noqa: F401
    from tinker.cli.__main__ import cli

    for line in sys.stdin:
        call = json.loads(line)
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            stdin.write(call["stdin"].encode())
            stdin.seek(0)
            child = os.fork()
            if child == 0:
                for number, file in enumerate((stdin, out, err)):
                    os.dup2(file.fileno(), number)
                os.chdir(call["cwd"])
                sys.argv = ["tinker", *call["words"]]
                _run(cli)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            for file in (out, err):
                file.seek(0)
            said = {"status": status, "out": out.read().decode(), "err": err.read().decode()}
        print(json.dumps(said), flush=True)


def _run(cli: Any) -> None:
    """Run the command and exit as the interpreter would."""
    status = 0
    try:
        cli()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001  the interpreter prints any exception and exits
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
