"""The service as processes that can be killed, stopped and deprived of their disk: an API process and its engine.

`python -m tests.faults.service` is the API process. It takes its settings from standard input, announces itself on
standard output, and reads the offset of its wall clock from a file. Its engine, fake or not, is a process of its own.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil

from tests.cluster.hidden import blind
from tests.service.support.databases import free_port
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.processes.client import start_local
from tinsmith.engine.processes.slots import LocalSlot
from tinsmith.processes.parent import watch_parent
from tinsmith.service.config import ServeConfig
from tinsmith.service.engines.host import RunningEngine
from tinsmith.service.server import serve

ROOT = Path(__file__).parents[2]
START_S = 60.0
"""Longest time until a started service is ready."""
LOAD_S = 300.0
"""The same for an engine of several processes, on machines that Ray may still be starting."""
STALL_S = 20.0
"""Longest time until the watchdog has killed a stopped engine."""
OFFSET = struct.Struct("d")
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class ServiceProcess:
    """A service on a data folder and a port, started again after each kill."""

    def __init__(
        self, config: ServeConfig, engines: Callable[[], list[int]] | None = None, blind_python: str | None = None
    ) -> None:
        """`engines`: finds the processes of its engine, where they are not near the API process.

        `blind_python`: a Python for these processes that does not see the data folder.
        """
        self._find_engines = engines or self._near_engines
        self._blind_python = blind_python
        self.config = config.model_copy(update={"port": free_port()})
        config.data.mkdir(parents=True, exist_ok=True)
        self._log = config.data.parent / f"{config.data.name}.log"
        self._clock = config.data.parent / f"{config.data.name}.clock"
        self._clock.write_bytes(OFFSET.pack(0.0))
        self._popen: subprocess.Popen[bytes] | None = None
        self._ready = threading.Event()
        self._pid = 0
        self._engine_killed = False
        """Whether the engine was killed while it was loading."""
        self.starts_s: list[float] = []
        """Time of each start until the service was ready."""

    def start(self) -> None:
        """Start the processes; `wait_until_ready` waits for them."""
        self._ready.clear()
        self._engine_killed = False
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", __name__]
            self._popen = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        options = {
            "config": self.config.model_dump(mode="json"),
            "clock": str(self._clock),
            "blind_python": self._blind_python,
        }
        self._popen.stdin.write(json.dumps(options).encode() + b"\n")
        self._pid = json.loads(self._popen.stdout.readline() or self._fail())["pid"]
        threading.Thread(target=self._wait, args=(self._popen, time.monotonic()), daemon=True).start()

    def wait_until_ready(self) -> None:
        """Wait until every engine is loaded.

        A service whose engine is killed while it loads ends; it is started again, as systemd would.
        """
        end = time.monotonic() + (START_S if self.config.cluster.is_single else LOAD_S)
        while not self._ready.wait(0.05):
            assert self._popen is not None
            if self._engine_killed and self._popen.poll() is not None:
                self._end(self._popen)
                self.start()
            elif time.monotonic() > end:
                self._fail()

    def kill(self, *, api: bool = True, engine: bool = False) -> None:
        """SIGKILL the processes. After this, those of a killed API process are gone."""
        engines = self.engines()
        if engine:
            _signal(engines, signal.SIGKILL)
            self.note_death()
        if api:
            assert self._popen is not None
            _signal([self._pid], signal.SIGKILL)
            _signal(engines, signal.SIGCONT)  # an engine ends with its API process, unless it is stopped
            self._end(self._popen)
            _wait_for_end(engines)

    def kill_process(self, choice: float) -> None:
        """SIGKILL one of the processes of the engine. `choice` (0 to 1) says which of those that run."""
        _signal(self._chosen(choice), signal.SIGKILL)
        self.note_death()

    def note_death(self) -> None:
        """A process of the engine was killed: a service that was loading it may end."""
        self._engine_killed = self._engine_killed or not self._ready.is_set()

    def stall_process(self, choice: float) -> bool:
        """SIGSTOP one of the processes of the engine until the watchdog has killed it. Whether that has happened."""
        pids = self._chosen(choice)
        _signal(pids, signal.SIGSTOP)
        self.note_death()
        try:
            return not psutil.wait_procs(_processes(pids), STALL_S)[1]
        finally:
            _signal(pids, signal.SIGCONT)

    def stop_process(self, choice: float) -> Callable[[], None]:
        """SIGSTOP one of the processes of the engine. Returns a function that lets it continue."""
        pids = self._chosen(choice)
        _signal(pids, signal.SIGSTOP)
        return lambda: _signal(pids, signal.SIGCONT)

    def _chosen(self, choice: float) -> list[int]:
        """One of the processes of the engine; none if none runs."""
        pids = sorted(self.engines())
        return [pids[int(choice * len(pids))]] if pids else []

    def stop(self, *, engine: bool) -> Callable[[], None]:
        """SIGSTOP one of the processes. Returns a function that lets it continue."""
        pids = self.engines() if engine else [self._pid]
        _signal(pids, signal.SIGSTOP)
        return lambda: _signal(pids, signal.SIGCONT)

    def stall_engine(self) -> bool:
        """SIGSTOP the engine until the watchdog has killed it. Whether that has happened."""
        self.wait_until_loaded()
        pids = self.engines()
        resume = self.stop(engine=True)
        try:
            return not psutil.wait_procs(_processes(pids), STALL_S)[1]
        finally:
            resume()

    def fill_disk(self) -> Callable[[], None]:
        """Let no file of the service grow, as on a full disk. Returns a function that undoes it."""
        pids = [self._pid, *self.engines()]
        _limit_files(pids, (0, resource.RLIM_INFINITY))
        return lambda: _limit_files(pids, UNLIMITED)

    def set_clock(self, offset_s: float) -> None:
        """Move the wall clock of the API process, now and after later starts."""
        with self._clock.open("r+b") as file:
            file.write(OFFSET.pack(offset_s))

    def engines(self) -> list[int]:
        """Process ids of the running engines."""
        return self._find_engines()

    def _near_engines(self) -> list[int]:
        """Children of the API process, or its siblings where tests/forkserver has forked it."""
        with suppress(psutil.NoSuchProcess):
            api = psutil.Process(self._pid)
            parent = api.parent()
            forked = parent is not None and "tests.forkserver.server" in parent.cmdline()
            near = parent.children() if forked and parent is not None else api.children()
            return [process.pid for process in near if process.pid != self._pid]
        return []

    def memory(self) -> int:
        """Bytes of memory of the API process that it shares with no other process."""
        return psutil.Process(self._pid).memory_full_info().uss

    def close(self) -> None:
        """End the service, in whatever state it is."""
        if self._popen is not None and self._popen.poll() is None:
            self.kill(engine=True)

    def wait_until_loaded(self, count: int = 0) -> None:
        """Wait until the engine, which may have been killed before, is loaded: loading has a longer time-out.

        `count`: of its processes, all of which must run.
        """
        end = time.monotonic() + (START_S if self.config.cluster.is_single else LOAD_S)
        while time.monotonic() < end:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{self.config.port}/readyz", timeout=5):
                if self._running_parts() >= count:
                    return
            time.sleep(0.05)
        self._fail()

    def _running_parts(self) -> int:
        """Processes of the engine that have loaded."""
        request = Request(f"http://127.0.0.1:{self.config.port}/api/v1/admin/processes")
        request.add_header("X-API-Key", self.config.api_key or "")
        with urlopen(request, timeout=5) as answer:
            models = json.load(answer)["base_models"]
        return sum(process["is_up"] for model in models for process in model["processes"])

    def _end(self, popen: subprocess.Popen[bytes]) -> None:
        popen.wait()
        for stream in (popen.stdin, popen.stdout):
            assert stream is not None
            stream.close()

    def _wait(self, popen: subprocess.Popen[bytes], start: float) -> None:
        assert popen.stdout is not None
        with suppress(ValueError, OSError):  # killed, and its output closed
            if popen.stdout.readline() and popen is self._popen:
                self.starts_s.append(time.monotonic() - start)
                self._ready.set()

    def _fail(self) -> Any:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
        raise AssertionError(f"The service does not start:\n{tail}")


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _limit_files(pids: list[int], limits: tuple[int, int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def _processes(pids: list[int]) -> list[psutil.Process]:
    """Those of the processes that have not ended."""
    running = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            running.append(psutil.Process(pid))
    return running


def _wait_for_end(pids: list[int]) -> None:
    """Wait until the processes have ended: nothing of them may write any more."""
    _, alive = psutil.wait_procs(_processes(pids), timeout=30)
    assert not alive, f"engines {alive} outlive their service"


async def start_in_process(config: EngineConfig) -> RunningEngine:
    """Start an engine, also a fake one, in a process of its own."""
    remote = await start_local(config)
    return RunningEngine(engine=remote, died=remote.died, process=remote)


def _skew_clock(file: Path) -> None:
    """Add the offset in the file to this process's wall clock."""
    with file.open("rb") as opened:
        shared = mmap.mmap(opened.fileno(), OFFSET.size, access=mmap.ACCESS_READ)
    real_time, real_time_ns = time.time, time.time_ns
    time.time = lambda: real_time() + OFFSET.unpack(shared[:])[0]
    time.time_ns = lambda: real_time_ns() + int(OFFSET.unpack(shared[:])[0] * 1e9)


def _start_blind(python: str) -> None:
    """Start the processes of slots with a Python that does not see the data folder."""
    sys.executable = python
    LocalSlot.run = blind(LocalSlot.run)  # type: ignore[method-assign]


def main() -> None:
    """Entry point of the API process."""
    options = json.loads(sys.stdin.buffer.readline())
    watch_parent(partial(os.kill, os.getpid(), signal.SIGKILL), descriptor=0)
    _skew_clock(Path(options["clock"]))
    if options["blind_python"] is not None:
        _start_blind(options["blind_python"])

    def announce(**values: object) -> None:
        print(json.dumps(values), flush=True)

    announce(pid=os.getpid())
    config = ServeConfig(**options["config"])
    start = start_in_process if config.cluster.is_single else None
    serve(config, start=start, on_ready=lambda url, _: announce(url=url))


if __name__ == "__main__":
    main()
