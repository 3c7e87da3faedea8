"""A server that is away for a while delays a run and changes nothing else.

To break it: let `ServerWatch._patient` return `retry`, or `_watch` return at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from tests.rl.reliability.kills import Work, outcome
from tests.rl.reliability.proxy import Action, Phase, proxied
from tinsmith.dialects import read_run
from tinsmith.errors import TinsmithError
from tinsmith.rl.policy.request_limit import AttemptClock, RequestLimit
from tinsmith.rl.policy.server_watch import ServerWatch
from tinsmith.runner import train_config
from tinsmith.testing import ScriptedPolicy, run_virtually

pytestmark = pytest.mark.e2e

OUTAGE_SECONDS = 2.5


def run(work: Work, name: str, url: str, monkeypatch: pytest.MonkeyPatch, *settings: str) -> Path:
    monkeypatch.setenv("TINKER_API_KEY", work.key)
    folder = work.folder / name
    words = (f"folder={folder}", f"model.base_url={url}", "monitors=[]", *settings)
    train_config(read_run(work.folder / "run.yaml", words).settings, Console(quiet=True))
    return folder


class Outages:
    """A hook that makes the server go away at some requests, each time for at least OUTAGE_SECONDS.

    An outage lasts until the run has noticed it: on a machine that stands still meanwhile, it would pass unseen.
    """

    def __init__(self, *places: tuple[Phase, str, int], noticed: Callable[[], bool]) -> None:
        """`noticed`: whether the run counts the server as away."""
        self._left, self._noticed, self._counts = list(places), noticed, dict[tuple[Phase, str], int]()
        self._is_out, self._until = False, 0.0
        self._lock = threading.Lock()

    def __call__(self, phase: Phase, name: str) -> Action:
        with self._lock:
            if self._is_out and (time.monotonic() < self._until or not self._noticed()):
                return "refuse"
            self._is_out = False
            count = self._counts[phase, name] = self._counts.get((phase, name), 0) + 1
            if self._left and self._left[0] == (phase, name, count):
                self._left.pop(0)
                self._is_out, self._until = True, time.monotonic() + OUTAGE_SECONDS
                return "refuse"
            return "pass"

    @property
    def over(self) -> bool:
        return not self._left


def test_run_waits_for_a_server_that_is_away(work, impatient_sdk, monkeypatch, in_folder, caplog):
    def waits() -> list[str]:
        return [text for record in [*caplog.records] if "the run waits for it" in (text := record.getMessage())]

    def returns() -> list[str]:
        return [text for record in [*caplog.records] if "responds again after" in (text := record.getMessage())]

    outages = Outages(
        ("after", "asample", 3),
        ("before", "forward_backward", 2),
        ("after", "optim_step", 3),
        ("after", "save_weights", 4),
        noticed=lambda: len(waits()) > len(returns()),
    )
    with proxied(work.url, outages) as proxy, caplog.at_level(logging.WARNING):
        folder = run(work, "away", proxy.url, monkeypatch)
    assert outages.over
    assert outcome(folder, work.data) == work.expected
    assert 4 <= len(waits()) == len(returns())  # more if this machine is slow
    message = "does not respond (status 503); the run waits for it, up to 1 h (model.wait)"
    assert any(message in text for text in waits())


def test_request_that_fails_as_the_server_returns_is_repeated(monkeypatch):
    """An attempt at the very end of an outage, after the last health check that failed. To break it: look only at
    health checks made since the attempt began."""
    watch, failures = ServerWatch(ping=0.01), [TimeoutError(), TimeoutError()]

    async def healthy(*_: object) -> str:
        return ""

    async def submit() -> str:
        if failures:
            raise failures.pop()
        return "done"

    monkeypatch.setattr(watch, "_fault", healthy)
    watch.is_away = True
    assert asyncio.run(watch.persist(submit)) == "done"
    watch.is_away = False
    failures.append(TimeoutError())
    with pytest.raises(TimeoutError):
        asyncio.run(watch.persist(submit))


def test_server_that_hangs_is_away_until_it_answers():
    """It accepts connections and answers nothing. To break it: leave out the timeout of the client in `_watch`."""

    async def main() -> None:
        answers, is_back = asyncio.Event(), asyncio.Event()
        changes, attempts, watch = list[bool](), 0, ServerWatch(ping=0.1, patience=0.2)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await reader.readuntil(b"\r\n\r\n")
                await answers.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
                await writer.drain()
            writer.close()

        async def submit() -> str:
            nonlocal attempts
            attempts += 1
            if not answers.is_set():
                raise TimeoutError  # as the SDK, when its own time limit is over
            return "done"

        def change(is_away: bool) -> None:
            changes.append(is_away)
            (answers if is_away else is_back).set()

        watch.on_change.append(change)
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        watch.attend(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with asyncio.timeout(100), watch.watching():
            assert await watch.persist(submit) == "done"
            await is_back.wait()
        assert changes == [True, False]
        assert attempts > 1
        server.close()

    asyncio.run(main())


def test_server_is_back_as_soon_as_a_request_succeeds(monkeypatch):
    """Also in another thread, and before the next health check, as a short run has ended by then. To break it: let
    `ServerWatch._return` do nothing."""

    async def main() -> None:
        watch, changed = ServerWatch(ping=0.05, patience=0.5), asyncio.Event()

        async def unhealthy(*_: object) -> str:
            return "gone"

        monkeypatch.setattr(watch, "_fault", unhealthy)
        watch.on_change.append(lambda _: changed.set())
        watch.attend("http://127.0.0.1:1")
        async with asyncio.timeout(100), watch.watching():
            await changed.wait()
            assert watch.is_away
            watch._ping = 60.0
            await asyncio.sleep(0.1)  # the next health check is a minute away
            await asyncio.to_thread(watch.succeeded)
            await asyncio.sleep(0)
            assert not watch.is_away

    asyncio.run(main())


def test_run_ends_when_the_server_stays_away_and_continues(work, impatient_sdk, monkeypatch, in_folder):
    with proxied(work.url, Outages(("after", "optim_step", 3), noticed=lambda: False)) as proxy:
        begin = time.monotonic()
        with pytest.raises(TinsmithError, match=r"has not responded for .* longer than model\.wait \(0\.5 s\)"):
            run(work, "gone", proxy.url, monkeypatch, "model.wait=0.5")
        assert time.monotonic() - begin < 200
    folder = run(work, "gone", work.url, monkeypatch)
    assert outcome(folder, work.data) == work.expected


def test_clocks_of_rollouts_stand_still_during_an_outage(tmp_path):
    async def main() -> None:
        limit = RequestLimit(1)
        snapshot = await ScriptedPolicy(("a",), tmp_path).snapshot()
        clock = AttemptClock(0.05)
        limit.suspend(True)
        async with clock:
            limit.around(snapshot, clock)
            await asyncio.sleep(0.15)
            limit.suspend(False)
            assert clock.seconds < 0.05
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(0.15)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        run_virtually(main())
