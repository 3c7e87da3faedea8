"""The pages in a real browser: the charts are drawn, nothing is refused by the pages' own policy."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn

from tests.dashboard.run_folders import write_run
from tinsmith.dashboard.access import Access, Logins, accepts_only
from tinsmith.dashboard.app import Sources, create_app
from tinsmith.dashboard.curves import PlottedRun, charts
from tinsmith.dashboard.runs import Runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """URL of a dashboard in a thread."""
    access = Access(accepts=accepts_only(""), logins=Logins(), is_open=lambda: True, missing="", explanation="")
    config = uvicorn.Config(create_app(Sources(folders=[folder]), access), log_level="error", lifespan="off", ws="none")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def dom(address: str, profile: Path, *options: str) -> tuple[str, str]:
    """The document after its scripts have run, and what the browser complained about."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom"]
    command += ["--enable-logging=stderr", f"--user-data-dir={profile}", *options, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.parametrize("options", [(), ("--window-size=390,800",), ("--blink-settings=preferredColorScheme=0",)])
def test_charts_are_drawn_and_nothing_is_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    for seed in range(2):
        write_run(tmp_path / "runs" / f"seed-{seed}", seed=seed)
    runs = Runs([tmp_path / "runs"])
    entries = runs.entries()
    plotted = [
        PlottedRun(label=entry.label, settings=runs.settings(entry), metrics=runs.open(entry).metrics)
        for entry in entries
    ]
    with served(tmp_path / "runs") as url:
        for path, shown in (
            (f"/runs/{entries[0].id}", plotted[:1]),
            (f"/compare?run={entries[0].id}&run={entries[1].id}", plotted),
        ):
            page, complaints = dom(url + path, tmp_path / "profile", *options)
            assert complaints == ""
            drawn = re.search(r'data-drawn="(\d+)"', page)
            assert drawn is not None
            assert int(drawn[1]) == len(charts(shown)) == page.count("<canvas")
        page, complaints = dom(f"{url}/runs", tmp_path / "profile", *options)
        assert complaints == ""
        assert page.count("no findings") == 2  # fetched by htmx, cell by cell


class Tab:
    """A page that runs, driven over the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        self._number += 1
        parameters = {"expression": script, "returnByValue": True, "awaitPromise": True}
        await self._socket.send_json({"id": self._number, "method": "Runtime.evaluate", "params": parameters})
        while (answer := await self._socket.receive_json()).get("id") != self._number:
            pass
        assert "exceptionDetails" not in answer["result"], answer
        return answer["result"]["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression of the page is true, for a minute of looks at most."""
        for _ in range(600):
            if await self.evaluate(script):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true: {script}")


@asynccontextmanager
async def tab(address: str, profile: Path) -> AsyncIterator[Tab]:
    """A page in a browser of its own."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}")
    browser = await asyncio.create_subprocess_exec(
        str(CHROMIUM), *options, "--window-size=900,500", address, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert browser.stderr is not None
        async for line in browser.stderr:
            if match := re.search(rb"DevTools listening on ws://(\S+?)/", line):
                break
        else:
            raise AssertionError("the browser has ended")
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://{match[1].decode()}/json") as response:
                pages = [each for each in await response.json() if each["type"] == "page"]
            async with http.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as connected:
                yield Tab(connected)
    finally:
        browser.terminate()
        await browser.wait()


def test_live_page_keeps_scroll_selection_and_what_is_open(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "live")
    [entry] = Runs([tmp_path / "runs"]).entries()

    async def look(url: str) -> None:
        async with tab(f"{url}/runs/{entry.id}", tmp_path / "profile") as page:
            await page.until("document.querySelectorAll('canvas').length > 5")
            await page.evaluate(
                "document.querySelector('#metrics').open = true;"
                "document.querySelector('input[name=metric]').checked = true;"
                "getSelection().selectAllChildren(document.querySelector('h1'));"
                "window.canvas = document.querySelector('canvas'); scrollTo(0, 300)"
            )
            with (folder / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"step": 21, "reward/mean": 0.4321}) + "\n")
            await page.until("""document.querySelector('[data-metric="reward/mean"]').textContent === '0.4321'""")
            state = await page.evaluate(
                "[document.querySelector('#metrics').open, document.querySelector('input[name=metric]').checked,"
                "getSelection().toString(), scrollY, window.canvas === document.querySelector('canvas')]"
            )
            assert state == [True, True, "runs/live", 300, True]

    with served(tmp_path / "runs") as url:
        asyncio.run(look(url))


def test_selected_runs_stay_selected_as_the_list_changes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name)
    runs = Runs([tmp_path / "runs"])
    second = next(entry.id for entry in runs.entries() if entry.folder.name == "a")

    async def look(url: str) -> None:
        async with tab(f"{url}/runs", tmp_path / "profile") as page:
            await page.until("document.querySelectorAll('tbody tr').length === 2")
            await page.evaluate(f"document.querySelector('#select-{second}').checked = true")
            write_run(tmp_path / "runs" / "c")
            await page.until("document.querySelectorAll('tbody tr').length === 3")
            checked = "[...document.querySelectorAll('input:checked')].map(each => each.value)"
            assert await page.evaluate(checked) == [second]

    with served(tmp_path / "runs") as url:
        asyncio.run(look(url))
