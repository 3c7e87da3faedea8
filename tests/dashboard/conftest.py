"""A dashboard of run folders, called without a port."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tinsmith.dashboard import rollout_pages
from tinsmith.dashboard.access import Access, Logins, accepts_only
from tinsmith.dashboard.app import Sources, create_app
from tinsmith.dashboard.service_state import ServiceClient

KEY = "a-key-of-the-tests"


@pytest.fixture
def dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TestClient]:
    """A function that makes a browser without JavaScript for a dashboard of tmp_path; open on loopback by default."""
    monkeypatch.setattr(rollout_pages, "_INDEX_S", None)  # however slow the machine is, a page has all files

    def made(*, is_open: bool = True, missing: str = "", service: ServiceClient | None = None) -> TestClient:
        access = Access(
            accepts=accepts_only(KEY), logins=Logins(), is_open=lambda: is_open, missing=missing, explanation="A key."
        )
        app = create_app(Sources(folders=[tmp_path], service=service), access)
        return TestClient(app, base_url="http://127.0.0.1:8020", headers={"accept": "text/html"})

    return made
