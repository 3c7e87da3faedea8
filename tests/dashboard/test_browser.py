"""The pages in a real browser: the charts are drawn, nothing is refused by the pages' own policy."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
