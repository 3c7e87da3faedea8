"""The commands `tinsmith doctor` and `tinsmith models`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from tinsmith.errors import ConfigError
from tinsmith.terminal import new_console

models = App(
    name="models",
    help="List the base models that a server serves and those on this machine; fetch, load or unload one.",
)

_MARKS = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server."""

    url: str | None = None
    """Base URL of the server. Default: TINKER_BASE_URL, else http://127.0.0.1:8000."""
    key: str | None = None
    """API key. Default: TINKER_API_KEY, else the one in ~/.tinsmith."""


def doctor(
    *overrides: Annotated[
        str, Parameter(help="Settings that override the file, such as engine=fake.", allow_leading_hyphen=False)
    ],
    config: Path | None = None,
    model: Annotated[tuple[str, ...] | None, Parameter(negative="", consume_multiple=False)] = None,
    data: Path | None = None,
    port: int | None = None,
    database: str | None = None,
    cluster: str | None = None,
    store: str | None = None,
) -> None:
    """Check this machine for everything the service needs. Each line is ok, warn or fail, with the fix.

    Exits with 1 if any check fails, else with 0.

    Parameters
    ----------
    config
        YAML or TOML file of the service's settings.
    model
        Base models to serve, each as NAME or NAME=SOURCE. May be given several times.
    data
        Data folder. Default: ~/.tinsmith.
    port
        Port. Default: 8000.
    database
        Database URL. Default: SQLite in the data folder.
    cluster
        Check the machines of a Ray cluster too: HOST:PORT, or `auto` for the one of this machine.
    store
        URL of the object store that its machines use, such as s3://BUCKET/PREFIX.
    """
    from rich.markup import escape

    from tinsmith.cli.doctor import run_checks
    from tinsmith.cli.serve import read_service_settings

    if cluster is not None:
        overrides += (f"cluster.address={cluster}",)
    options = {"models": model, "data": data, "port": port, "database": database, "store": store}
    settings = read_service_settings(config, overrides, options)
    findings = run_checks(settings)
    if settings.cluster.address is not None:
        from tinsmith.cli.doctor_cluster import run_cluster_checks

        findings = chain(findings, run_cluster_checks(settings))
    console, failed = new_console(soft_wrap=True), False
    for finding in findings:
        console.print(f"{_MARKS[finding.level]}  {finding.check:<10}  {escape(finding.message)}", highlight=False)
        if finding.fix:
            console.print(f"      {'':<10}  [dim]{escape(finding.fix)}[/]", highlight=False)
        failed |= finding.level == "fail"
    sys.exit(1 if failed else 0)


@models.default
def show(server: Server | None = None) -> None:
    """List the models that a running server serves, and those on this machine."""
    from rich.markup import escape

    from tinsmith.cli.catalog import cached, not_served, served

    console = new_console(soft_wrap=True)
    url, key = server_address(server or Server())
    try:
        for model in served(url, key):
            first, *lines = model.details.split("\n")
            details = f"; {escape(first)}" if first else ""
            console.print(f"served  {escape(model.name)}  [dim]context {model.context}{details}[/]", highlight=False)
            for line in lines:
                console.print(f"          [dim]{escape(line)}[/]", highlight=False)
        for model in not_served(url, key):
            console.print(f"{model.state:<7} {escape(model.name)}  [dim]{escape(model.error)}[/]", highlight=False)
    except ConfigError as error:
        if server is not None and server.url is not None:
            raise
        console.print(f"[dim]{escape(str(error))}[/]", highlight=False)
    for model in cached():
        console.print(f"cached  {escape(model.name)}  [dim]{model.size_bytes / 1e6:.0f} MB[/]", highlight=False)


@models.command
def pull(name: str, /) -> None:
    """Fetch a base model before a server needs it.

    Parameters
    ----------
    name
        Hub id, or a GGUF file to convert.
    """

    from tinsmith.cli import catalog

    new_console(soft_wrap=True).print(str(catalog.pull(name)), highlight=False, markup=False)


@models.command
def load(
    name: str, /, *, replace: Annotated[bool, Parameter(negative="")] = False, server: Server | None = None
) -> None:
    """Load a base model into a running server, and wait until it is served. Needs an admin key.

    The server serves it after a restart too.

    Parameters
    ----------
    name
        NAME or NAME=SOURCE, as for `tinsmith serve --model`.
    replace
        Unload the model that is served under this name first.
    """

    from tinsmith.cli import catalog

    name, _, source = name.partition("=")
    catalog.load(*server_address(server or Server()), name, source or name, replace=replace)
    new_console(soft_wrap=True).print(f"{name} is served", highlight=False, markup=False)


@models.command
def unload(name: str, /, *, server: Server | None = None) -> None:
    """Unload a base model of a running server. Needs an admin key.

    Nothing is lost: its models in training and the requests that wait go on when it is loaded again.
    """

    from tinsmith.cli import catalog

    catalog.unload(*server_address(server or Server()), name)
    new_console(soft_wrap=True).print(f"{name} is not served any more", highlight=False, markup=False)


def server_address(server: Server) -> tuple[str, str]:
    """(base URL, API key) of a server."""
    from tinsmith.service.config import ServeConfig

    url = server.url or os.environ.get("TINKER_BASE_URL") or "http://127.0.0.1:8000"
    key = server.key or os.environ.get("TINKER_API_KEY") or ""
    key_file = ServeConfig().key_file
    return url, key if key or not key_file.is_file() else key_file.read_text().strip()
