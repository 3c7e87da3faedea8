"""Servers in child processes for the time of a measurement, and their memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

KEY = "tml-benchmark"
MODEL = "bench/smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Address and first process of a server."""

    url: str
    process: psutil.Process

    def memory(self) -> int:
        """Resident bytes of the process and its children; shared pages are counted in each."""
        total = 0
        for process in (self.process, *self.process.children(recursive=True)):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue  # ended since it was listed
        return total


@contextmanager
def tinsmith(folder: Path, dtype: str, data: Path, threads: int = 0) -> Iterator[Server]:
    """`tinsmith serve` with one model."""
    port = _free_port()
    command = [sys.executable, "-m", "tinsmith", "serve", "--model", f"{MODEL}={folder}", "--dtype", dtype]
    command += ["--port", str(port), "--data", str(data), "--api-key", KEY, "--threads", str(threads)]
    with _running(command, port, "/api/v1/healthz") as server:
        yield server


@contextmanager
def stub() -> Iterator[Server]:
    """The stub server, which computes nothing."""
    port = _free_port()
    with _running([sys.executable, "-m", "benchmarks.stub_server", str(port)], port, "/polls") as server:
        yield server


@contextmanager
def timed_service(data: Path) -> Iterator[Server]:
    """The service with TimedEngine."""
    port = _free_port()
    command = [sys.executable, "-m", "benchmarks.timed_service", str(port), str(data)]
    with _running(command, port, "/api/v1/healthz") as server:
        yield server


class Watch:
    """Samples a server's memory every tenth of a second; `peak` is the largest value, in bytes."""

    def __init__(self, server: Server) -> None:
        self.peak = 0
        self._server, self._over = server, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self.peak = max(self.peak, self._server.memory())


@contextmanager
def _running(command: Sequence[str], port: int, health: str) -> Iterator[Server]:
    process = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    server = Server(url=f"http://127.0.0.1:{port}", process=psutil.Process(process.pid))
    try:
        _wait_until_healthy(process, server.url + health)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            raise RuntimeError(f"the server at {url} ended with {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError(f"nothing healthy at {url} after two minutes")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
