"""The commands `tinsmith admin …`: what tenants have on a running server, with an admin key."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from cyclopts import App, Parameter

from tinsmith.cli.documents.output import AsJson, print_json
from tinsmith.cli.machine import Server, server_address
from tinsmith.errors import ConfigError
from tinsmith.http_common import refusal
from tinsmith.plurals import display_bytes, display_seconds
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    from rich.table import Table

app = App(name="admin", help="Sessions, queues and use of a running server, for all tenants. Needs an admin key.")

TIMEOUT_S = 30.0
MAX_WIDTH = 1000
"""A table may be wider than the terminal, which wraps it: ids are not cut."""


@app.command
def sessions(
    *,
    ended: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    as_json: AsJson = False,
    server: Server | None = None,
) -> None:
    """List sessions of all tenants, those seen last first.

    Parameters
    ----------
    ended
        List ended sessions too.
    """
    answer = _call("GET", f"sessions?ended={str(ended).lower()}", server)
    columns = ("session", "owner", "name", "seen", "models", "samplers", "versions", "checkpoints", "disk", "ended")
    rows = [
        (
            each["session_id"],
            each["owner"],
            each["display_name"] or "",
            f"{display_seconds(each['seen_s'])} ago",
            _models(each["models"]),
            each["sampling_sessions"],
            each["versions"],
            each["checkpoints"],
            display_bytes(each["disk_bytes"]),
            each["ended"] or "",
        )
        for each in answer["sessions"]
    ]
    _print(answer, columns if ended else columns[:-1], rows, as_json)


@app.command
def queue(*, as_json: AsJson = False, server: Server | None = None) -> None:
    """List requests without a result of all tenants, in the order in which they are expected to end."""
    answer = _call("GET", "queue", server)
    columns = ("request", "owner", "base model", "kind", "tokens", "state", "waited", "ends in")
    rows = [
        (
            each["request_id"],
            each["owner"],
            queue["base_model"],
            each["kind"],
            each["tokens"],
            "running" if each["running"] else f"{each['place']} before it",
            display_seconds(each["waited_s"]),
            "" if each["expected_s"] is None else f"about {display_seconds(each['expected_s'])}",
        )
        for queue in answer["queues"]
        for each in queue["requests"]
    ]
    _print(answer, columns, rows, as_json)


def status(*, as_json: AsJson = False, server: Server | None = None) -> None:
    """List the processes of a running server: where each runs, its load, and its versions. Needs an admin key."""
    answer = _call("GET", "processes", server)
    columns = ("base model", "process", "state", "machine", "device", "pid", "start", "samples", "tokens", "versions")
    rows = [
        (
            model["base_model"],
            each["name"],
            "up" if each["is_up"] else "down",
            f"{each['machine']} ({each['host']})",
            _device(each),
            each["pid"],
            each["generation"],
            *("" if each[name] is None else each[name] for name in ("running", "cache_tokens", "versions")),
        )
        for model in answer["base_models"]
        for each in model["processes"]
    ]
    rows += [
        (model["base_model"], "", model["state"], *[""] * (len(columns) - 3))
        for model in answer["base_models"]
        if not model["processes"]
    ]
    _print(answer, columns, rows, as_json)


def _device(process: dict[str, Any]) -> str:
    """Where a process computes; the only process of a base model takes the default GPU, if there is one."""
    if process["gpus"]:
        return f"GPU {','.join(process['gpus'])}"
    return "CPU or default GPU" if process["name"] == "engine" else "CPU"


@app.command
def usage(*, as_json: AsJson = False, server: Server | None = None) -> None:
    """List what each tenant holds: sessions, models and their memory, bytes on disk, unfinished requests."""
    answer = _call("GET", "usage", server)
    columns = ("owner", "sessions", "models", "memory", "checkpoints", "on disk", "versions", "on disk", "unfinished")
    rows = [
        (
            each["owner"],
            each["sessions"],
            each["models"],
            display_bytes(each["memory_bytes"]),
            each["checkpoints"],
            display_bytes(each["checkpoint_bytes"]),
            each["versions"],
            display_bytes(each["version_bytes"]),
            each["unfinished_requests"],
        )
        for each in answer["tenants"]
    ]
    _print(answer, columns, rows, as_json)


@app.command
def end(name: str, /, *, server: Server | None = None) -> None:
    """End a session or a model of any tenant. Queued training still runs; running samples of a session are cancelled.

    Parameters
    ----------
    name
        Id of the session or of the model.
    """
    kind = "models" if ":train:" in name else "sessions"
    _call("POST", f"{kind}/{quote(name, safe='')}/end", server)
    sys.stdout.write(f"{name} ends.\n")


@app.command
def cancel(request: str, /, *, server: Server | None = None) -> None:
    """Cancel a waiting or running sample of any tenant.

    Parameters
    ----------
    request
        As `admin queue` lists it.
    """
    _call("POST", f"requests/{quote(request, safe='')}/cancel", server)
    sys.stdout.write(f"{request} is cancelled.\n")


def _call(method: str, path: str, server: Server | None) -> Any:
    """The server's answer. Raises ConfigError if it does not answer, or refuses."""
    import httpx

    url, key = server_address(server or Server())
    address = f"{url.rstrip('/')}/api/v1/admin/{path}"
    try:
        response = httpx.request(method, address, headers={"X-API-Key": key}, timeout=TIMEOUT_S)
    except httpx.HTTPError as error:
        raise ConfigError(f"No server responds at {url}: {error}.", "Start one: tinsmith serve") from error
    if response.is_error:
        raise ConfigError(refusal(response, url))
    return response.json() if response.content else None


def _print(answer: Any, columns: Sequence[str], rows: Sequence[Sequence[Any]], as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    from rich.measure import Measurement

    console, table = new_console(), _table(columns, rows)
    needed = Measurement.get(console, console.options.update(width=MAX_WIDTH), table).maximum
    new_console(width=max(console.width, needed)).print(table if rows else "[dim]none[/]")


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        is_number = all(isinstance(row[number], int) for row in rows)
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row[: len(columns)]))
    return table


def _models(models: Sequence[dict[str, Any]]) -> str:
    live = (each for each in models if each["state"] in ("pending", "live"))
    return ", ".join(
        f"{each['model_id'].rpartition(':')[2]} (rank {each['rank']}{'' if each['in_memory'] else ', on disk'})"
        for each in live
    )
