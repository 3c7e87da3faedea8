"""The command `tinsmith dashboard`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from tinsmith.dashboard.service_state import ServiceClient

KEY_VARIABLE = "TINSMITH_DASHBOARD_KEY"

Places = Annotated[
    str,
    Parameter(
        name="FOLDERS | URL",
        help="Folders of runs, the URL of a running service, or both. Default: ./runs.",
        allow_leading_hyphen=False,
    ),
]


def dashboard(
    *places: Places,
    host: str = "127.0.0.1",
    port: int = 8020,
    key: str | None = None,
    path: str = "",
    service_key: str | None = None,
) -> None:
    """Show runs, live and past, and a service as web pages, until interrupted.

    Runs are read from their folders alone: while they are on, after they have ended, and as copies from elsewhere.

    Parameters
    ----------
    host
        Address to listen on. On another than a loopback address, a key is needed.
    port
        Port to listen on; 0 picks a free one.
    key
        Key that opens the pages. Default: TINSMITH_DASHBOARD_KEY; else none on a loopback address, and a new one,
        which is printed, on others.
    path
        Path at which a proxy shows the pages, such as /tinsmith.
    service_key
        Admin key of the service. Default: TINKER_API_KEY, else the one in ~/.tinsmith.
    """
    from tinsmith.dashboard.app import Sources
    from tinsmith.dashboard.server import DashboardConfig, serve

    urls = [place for place in places if place.startswith(("http://", "https://"))]
    if len(urls) > 1:
        raise ConfigError(f"{len(urls)} services are given: {', '.join(urls)}.", "Start a dashboard for each.")
    folders = [Path(place) for place in places if place not in urls] or ([] if urls else [Path("runs")])
    for folder in folders:
        if places and not folder.is_dir():
            raise ConfigError(f"There is no folder {folder}.", "Name folders of runs. Example: tinsmith dashboard runs")
    if service_key is not None and not urls:
        raise ConfigError("--service-key is not used without the URL of a service.", "Add the URL, or leave it out.")
    config = DashboardConfig(host=host, port=port, key=key or os.environ.get(KEY_VARIABLE, ""), path=path)
    serve(config, Sources(folders=folders, service=_client(urls[0], service_key) if urls else None), _announce)


def _client(url: str, key: str | None) -> ServiceClient:
    from tinsmith.cli.machine import Server, server_address
    from tinsmith.dashboard.service_state import ServiceClient

    return ServiceClient(*server_address(Server(url=url, key=key)))


def _announce(url: str, key: str) -> None:
    sys.stdout.write(f"Dashboard: {url}\n")
    if key:
        sys.stdout.write(f"Key: {key}\n")
    sys.stdout.flush()
