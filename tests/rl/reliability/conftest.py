"""A service, and a run on it that nothing interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from tinker._base_client import BaseClient
from tinker.lib.internal_client_holder import InternalClientHolder

from tests.rl.reliability.kills import RUN_FILE, SECONDS, Work, outcome, start
from tests.rl.reliability.proxy import Action, Phase, proxied
from tinsmith.rl.policy.server_watch import ServerWatch
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded


@pytest.fixture(scope="module")
def work(forked_programs: str, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Work]:
    folder = tmp_path_factory.mktemp("kills")
    (folder / "tiny").symlink_to(tiny_llama)  # the fake engine's weights come from its source's name
    (folder / "run.yaml").write_text(RUN_FILE)
    requests: list[tuple[Phase, str]] = []

    def note(phase: Phase, name: str) -> Action:
        requests.append((phase, name))
        return "pass"

    data = folder / "data"
    with (
        chdir(folder),  # the server finds the model there too
        embedded(ServeConfig(models=("tiny=tiny",), engine="fake", data=data)) as (url, key),
        proxied(url, note) as proxy,
    ):
        assert start(folder, folder / "whole", proxy.url, key).wait(SECONDS) == 0
        yield Work(folder, url, key, data, outcome(folder / "whole", data), requests)


@pytest.fixture
def in_folder(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the folder of `work` the working directory."""
    monkeypatch.chdir(work.folder)


@pytest.fixture
def impatient_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK gives up after a few tenths of a second, instead of minutes; the watch looks more often."""

    async def once(self: object, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    monkeypatch.setattr(BaseClient, "_calculate_retry_timeout", lambda *_: 0.05)
    monkeypatch.setattr(InternalClientHolder, "execute_with_retries", once)
    assert ServerWatch.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(ServerWatch.__init__.__kwdefaults__, "ping", 0.3)
    monkeypatch.setitem(ServerWatch.__init__.__kwdefaults__, "patience", 0.5)
