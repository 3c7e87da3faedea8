"""The commands that look at a machine and at what is served: `tinsmith doctor` and `tinsmith models`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from tinsmith.errors import ConfigError

models = App(
    name="models", help="Base models: what a running server serves, what is on this machine, and fetching more."
)

_MARKS = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server."""

    url: str | None = None
    """Its base URL; TINKER_BASE_URL if not given, else http://127.0.0.1:8000."""
    key: str | None = None
    """A key of it; TINKER_API_KEY if not given, else the one kept in ~/.tinsmith."""


def doctor(
    *overrides: Annotated[str, Parameter(help="Settings laid on top.", allow_leading_hyphen=False)],
    config: Path | None = None,
    data: Path | None = None,
    port: int | None = None,
    database: str | None = None,
) -> None:
    """Look at this machine: has it what a service needs? Each line is ok, warn or fail, with the cure.

    Ends with 1 if anything fails, else with 0.

    Parameters
    ----------
    config
        The service's YAML or TOML file of settings.
    data
        Its data folder; ~/.tinsmith if not given.
    port
        Its port; 8000 if not given.
    database
        Its database, if that is not in the data folder.
    """
    from rich.console import Console
    from rich.markup import escape

    from tinsmith.cli.doctor import examine
    from tinsmith.service.config import ServeConfig
    from tinsmith.settings import COMMAND_LINE, build, read_values

    options = {"data": data, "port": port, "database": database}
    given = {name: value for name, value in options.items() if value is not None}
    settings = build(ServeConfig, {**read_values(config, overrides), **given}, str(config or COMMAND_LINE), overrides)
    console, failed = Console(soft_wrap=True), False
    for found in examine(settings):
        console.print(f"{_MARKS[found.level]}  {found.place:<10}  {escape(found.what)}", highlight=False)
        if found.cure:
            console.print(f"      {'':<10}  [dim]{escape(found.cure)}[/]", highlight=False)
        failed |= found.level == "fail"
    sys.exit(1 if failed else 0)


@models.default
def show(server: Server | None = None) -> None:
    """What a running server serves, and what is on this machine."""
    from rich.console import Console
    from rich.markup import escape

    from tinsmith.cli.catalog import cached, served

    console = Console(soft_wrap=True)
    url, key = _address(server or Server())
    try:
        for one in served(url, key):
            console.print(f"served  {escape(one.name)}  [dim]context {one.context}[/]", highlight=False)
    except ConfigError as error:
        if server is not None and server.url is not None:
            raise
        console.print(f"[dim]{escape(str(error))}[/]", highlight=False)
    for one in cached():
        console.print(f"cached  {escape(one.name)}  [dim]{one.size_bytes / 1e6:.0f} MB[/]", highlight=False)


@models.command
def pull(name: str, /) -> None:
    """Fetch a base model, so that a server need not when it starts.

    Parameters
    ----------
    name
        A hub id; or a GGUF file, which is converted.
    """
    from rich.console import Console

    from tinsmith.cli import catalog

    Console(soft_wrap=True).print(str(catalog.pull(name)), highlight=False, markup=False)


def _address(server: Server) -> tuple[str, str]:
    from tinsmith.service.config import ServeConfig

    url = server.url or os.environ.get("TINKER_BASE_URL") or "http://127.0.0.1:8000"
    key = server.key or os.environ.get("TINKER_API_KEY") or ""
    kept = ServeConfig().data / "api-key"
    return url, key if key or not kept.is_file() else kept.read_text().strip()
