"""A server that hangs for a while, and then goes on: the run waits, and its weights, metrics and rollouts are the same.

The server's process is stopped (SIGSTOP) with a request on its way: the system still accepts connections, and nothing
is answered. The SDK gives the request up and sends it again; later the server reads both. To break it: let
`ServerWatch._patient` return `retry`, or let `RequestLimit.suspend` do nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from tests.rl.reliability.kills import SECONDS, Work, outcome, start
from tests.rl.reliability.proxy import Action, Phase, proxied
from tinsmith.dialects import read_run
from tinsmith.runner import train_config
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import end_service, start_service, url_of

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_folder")]

KEY = "tml-" + "h" * 32
ROLLOUT_SECONDS = 12
"""Time limit of a rollout, which the first hang outlasts."""
AWAY, BACK = "the run waits for it", "responds again after"


class Server:
    """A service in a process that a test stops."""

    def __init__(self, data: Path, python: str) -> None:
        """`python` is an ordinary one: the clients of a forked one do not pass SIGSTOP on."""
        config = ServeConfig(models=("tiny=tiny",), engine="fake", data=data, port=0, api_key=KEY)
        self.data, log = data, data.with_suffix(".log")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", python)
            self._child = start_service(config, log)
        self.url = url_of(self._child, log)

    def stop(self) -> None:
        os.kill(self._child.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._child.pid, signal.SIGCONT)

    def end(self) -> None:
        self.go_on()
        end_service(self._child)


@contextmanager
def served(data: Path, python: str) -> Iterator[Server]:
    """A server for the duration of a block."""
    server = Server(data, python)
    try:
        yield server
    finally:
        server.end()


def wait_until(holds: Callable[[], bool], fault: str) -> None:
    """Wait at most SECONDS."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, fault
        time.sleep(0.05)


class Hangs:
    """A hook that stops the server before some requests reach it, until the run has noticed and `seconds` more."""

    def __init__(self, server: Server, noticed: Callable[[], bool], *places: tuple[str, int, float]) -> None:
        """`places`: name of a request, which one of that name, seconds. `noticed`: whether the run counts the server as
        away."""
        self._server, self._noticed, self._left = server, noticed, list(places)
        self._counts = dict[str, int]()
        self.threads: list[threading.Thread] = []

    def __call__(self, phase: Phase, name: str) -> Action:
        if phase == "before":
            count = self._counts[name] = self._counts.get(name, 0) + 1
            if self._left and self._left[0][:2] == (name, count):
                seconds = self._left.pop(0)[2]
                self._server.stop()
                self.threads.append(threading.Thread(target=self._go_on, args=(seconds,)))
                self.threads[-1].start()
        return "pass"

    def _go_on(self, seconds: float) -> None:
        try:
            wait_until(self._noticed, "the run has not noticed")
            time.sleep(seconds)
        finally:
            self._server.go_on()


def test_run_waits_for_a_server_that_hangs(
    work: Work,
    forked_programs: str,
    impatient_sdk: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def count(text: str) -> int:
        return sum(text in record.getMessage() for record in [*caplog.records])

    monkeypatch.setattr("tinker._base_client.DEFAULT_TIMEOUT", httpx.Timeout(3.0))
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    folder = work.folder / "hung"
    with served(work.folder / "hanging", forked_programs) as server:
        places = ("asample", 3, ROLLOUT_SECONDS + 2.0), ("forward_backward", 2, 0.0), ("optim_step", 3, 0.0)
        hangs = Hangs(server, lambda: count(AWAY) > count(BACK), *places)
        with proxied(server.url, hangs) as proxy:
            words = (f"folder={folder}", f"model.base_url={proxy.url}", f"rollout.timeout={ROLLOUT_SECONDS}")
            train_config(read_run(work.folder / "run.yaml", words).settings, Console(quiet=True))
        for thread in hangs.threads:
            thread.join(SECONDS)
        assert len(hangs.threads) == len(places)
        assert outcome(folder, server.data) == work.expected
    assert count(AWAY) == count(BACK) >= len(places)


@pytest.mark.slow
def test_process_of_a_run_waits_for_a_server_that_hangs(work: Work, forked_programs: str):
    """As a user has it: the SDK's own time limits, and hangs that are longer than they are.

    Fails if the watch says only at its next health check that the server responds (`ServerWatch._return`).
    """
    folder, log = work.folder / "hung-process", work.folder / "hung-process.log"
    with served(work.folder / "hanging-process", forked_programs) as server:

        def is_away() -> bool:
            text = log.read_text()
            return text.count(AWAY) > text.count(BACK)

        hangs = Hangs(server, is_away, ("asample", 3, 70.0), ("optim_step", 3, 0.0))
        with proxied(server.url, hangs) as proxy:
            process = start(work.folder, folder, proxy.url, KEY, "rollout.timeout=40", "model.wait=600")
            assert process.wait(4 * SECONDS) == 0, log.read_text()
        assert len(hangs.threads) == log.read_text().count(AWAY) == log.read_text().count(BACK) == 2, log.read_text()
        assert outcome(folder, server.data) == work.expected
