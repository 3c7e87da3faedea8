"""Executes a Python program in a sandbox and collects its output. Blocks: a run calls it in a worker process."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tinsmith.errors import ConfigError
from tinsmith.processes.confine import NOT_CONFINED
from tinsmith.processes.start import start_confined, start_program
from tinsmith.rl.sandbox.config import SandboxConfig

Ending = Literal["done", "error", "timeout", "output"]
"""Of a program: its exit code was 0, or not; or it exceeded the limit of time or of output."""

START_S = 120.0
"""Time limit of starting Python in a sandbox."""
PULL_S = 1800.0
"""Time limit of starting a container, whose image may be downloaded first."""
_SHOWN = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)
"""What Python needs of the system, beside itself."""
_CHUNK = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a program did.

    Example: Execution(output="4\\n", errors="", ending="done", completed=True)
    """

    output: str
    """Standard output."""
    errors: str
    """Standard error, with the traceback of an exception that was not caught."""
    ending: Ending
    """Why it ended."""
    completed: bool
    """Whether its last statement was reached."""


def execute(
    parts: Sequence[tuple[str, str]], settings: Mapping[str, Any], stdin: str = "", show_value: bool = False
) -> Execution:
    """Execute the parts of a program, each a name for tracebacks and its source, in one new Python process.

    `settings` are those of SandboxConfig. `show_value`: print the value of a last expression. Raises ConfigError if the
    sandbox cannot be started.
    """
    config = SandboxConfig.model_validate(settings)
    mark = secrets.token_hex(16)
    job = json.dumps({"parts": parts, "mark": mark, "show_value": show_value}).encode()
    data = b"%12d" % len(job) + job + stdin.encode()
    with tempfile.TemporaryDirectory(prefix="tinsmith-sandbox-", ignore_cleanup_errors=True) as folder:
        name = f"tinsmith-{mark}"
        process = _start(config, folder, name)
        try:
            collected = _Collected(mark.encode(), config)
            ending = collected.converse(process, data)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if config.kind != "process":
                start_program([config.kind, "kill", name]).communicate()
    if not collected.has_begun and ending is None:
        raise _not_started(config, code, collected.texts[1])
    output, errors = (bytes(text).decode(errors="replace") for text in collected.texts)
    return Execution(
        output=output,
        errors=errors.removesuffix(mark),
        ending=ending or ("error" if code else "done"),
        completed=ending is None and errors.endswith(mark),
    )


def _start(config: SandboxConfig, folder: str, name: str) -> subprocess.Popen[bytes]:
    source = (Path(__file__).parent / "program.py").read_text()
    if config.kind != "process":
        memory = f"{config.memory_mb}m"
        return start_program(
            [
                *(config.kind, "run", "--rm", "--interactive", "--name", name, "--network", "none", "--read-only"),
                *("--tmpfs", f"/tmp:rw,size={config.disk_mb}m,mode=1777", "--workdir", "/tmp", "--env", "HOME=/tmp"),
                *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(config.processes)),
                *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534"),
                *(config.image, "python", "-I", "-B", "-X", "utf8", "-c", source),
            ]
        )
    prefixes = dict.fromkeys((sys.base_prefix, os.path.realpath(sys.base_prefix), sys.prefix))
    limits = {
        "folder": folder,
        "shown": [*_SHOWN, *(path for path in prefixes if not path.startswith("/usr/"))],
        "strict": config.strict,
        "memory_bytes": config.memory_mb << 20,
        "disk_bytes": config.disk_mb << 20,
        "cpu_seconds": int(config.timeout * 2) + 10,  # for what outlives the time limit
        "processes": config.processes,
        "number": os.getpid() * 0x100 % 0x3FFFFF00 + secrets.randbelow(0x100),
    }
    return start_confined([sys.executable, "-I", "-B", "-X", "utf8", "-c", source], json.dumps(limits))


def _not_started(config: SandboxConfig, code: int, errors: bytearray) -> ConfigError:
    if code == NOT_CONFINED:
        return ConfigError(
            "sandbox.strict: the kernel of this machine grants no namespaces to this user.",
            "Allow them (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), use kind: "
            "docker or podman, or set strict: false.",
        )
    said = errors.decode(errors="replace").strip()[-500:]
    return ConfigError(f"The sandbox ({config.kind}) could not be started, exit code {code}: {said}", "Fix the cause.")


class _Collected:
    """Output of a process while it runs: of both streams, up to the limit."""

    def __init__(self, mark: bytes, config: SandboxConfig) -> None:
        self._mark, self._config = mark, config
        self.texts = (bytearray(), bytearray())
        self.has_begun = False

    def converse(self, process: subprocess.Popen[bytes], data: bytes) -> Ending | None:
        """Send the data and read until the process ends: None; or the limit that it exceeded."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        deadline = time.monotonic() + (START_S if self._config.kind == "process" else PULL_S)
        rest = memoryview(data)
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector, process.stdin, process.stdout, process.stderr:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            for number, stream in enumerate((process.stdout, process.stderr)):
                selector.register(stream, selectors.EVENT_READ, self.texts[number])
            while len(selector.get_map()) > (process.stdin in (key.fileobj for key in selector.get_map().values())):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    return "timeout"
                for key, _ in ready:
                    if key.data is None:
                        rest = _write(selector, process.stdin, rest)
                    elif chunk := os.read(key.fd, _CHUNK):
                        key.data.extend(chunk)
                    else:
                        selector.unregister(key.fileobj)
                if not self.has_begun and self.texts[1].startswith(self._mark):
                    del self.texts[1][: len(self._mark)]
                    self.has_begun, deadline = True, time.monotonic() + self._config.timeout
                if sum(map(len, self.texts)) > self._config.output_kb << 10:
                    return "output"
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "timeout"
        return None


def _write(selector: selectors.BaseSelector, stream: Any, rest: memoryview) -> memoryview:
    """Write what the pipe takes; close it at the end of the data, or if nobody reads it."""
    try:
        rest = rest[os.write(stream.fileno(), rest[:_CHUNK]) :]
    except BlockingIOError:
        return rest
    except BrokenPipeError:
        rest = rest[:0]
    if not rest:
        selector.unregister(stream)
        stream.close()
    return rest
