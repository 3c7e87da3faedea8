"""The commands `tinsmith backup`, `tinsmith restore` and `tinsmith verify`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.cli.service.keys import ServiceLocation
from tinsmith.plurals import counted
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    from rich.console import Console

    from tinsmith.service.backup.verify import Check
    from tinsmith.service.config import ServeConfig

SHOWN = 20
"""Faults of one check that are printed."""


def backup(destination: Path, /, *, where: ServiceLocation | None = None) -> None:
    """Back up a service's data folder and database, while its server runs or not. Exits with 1 if something is missing.

    An earlier backup in the folder is replaced at the end; its unchanged files are not copied again.

    Parameters
    ----------
    destination
        Folder of the backup.
    """
    from rich.markup import escape

    from tinsmith.service.backup.create import back_up

    os.umask(0o077)  # a backup holds keys
    settings = _settings(where)
    made = back_up(settings.data, settings.database, destination)
    console, files = new_console(soft_wrap=True), counted(len(made.manifest.files), "file")
    unchanged = f", {made.reused} unchanged" if made.reused else ""
    console.print(
        f"{destination}: {files}{unchanged}, {made.size_bytes / 1e6:.1f} MB, as of {made.manifest.created}",
        highlight=False,
        markup=False,
    )
    for path in made.manifest.missing[:SHOWN]:
        console.print(f"[bold red]missing[/]  {escape(str(settings.data / path))}", highlight=False)
    sys.exit(1 if made.manifest.missing else 0)


def restore(source: Path, /, *, data: Path, database: str | None = None) -> None:
    """Restore a backup into an empty data folder, once all its files agree with its manifest.

    Parameters
    ----------
    source
        Folder of the backup.
    data
        Data folder to make.
    database
        URL of an empty PostgreSQL database for the rows. Default: SQLite in the data folder.
    """
    from tinsmith.service.backup.restore import restore as restore_backup

    os.umask(0o077)
    manifest = restore_backup(source, data, database)
    files = counted(len(manifest.files), "file")
    new_console(soft_wrap=True).print(
        f"{data}: {files} as of {manifest.created}; start it with tinsmith serve --data {data}",
        highlight=False,
        markup=False,
    )


def verify(folder: Path, /, *, database: str | None = None) -> None:
    """Check that a data folder, also of a running server, or a backup has all that its records refer to.

    Exits with 1 if anything is wrong, else with 0.

    Parameters
    ----------
    folder
        Data folder or backup.
    database
        Database URL of a data folder. Default: SQLite in it.
    """
    from tinsmith.service.backup.verify import verify as checks_of

    console, failed = new_console(soft_wrap=True), False
    for check in checks_of(folder, database):
        _print_check(console, check)
        failed |= bool(check.faults) and not check.is_harmless
    sys.exit(1 if failed else 0)


def _print_check(console: Console, check: Check) -> None:
    from rich.markup import escape

    mark = "[green]ok  [/]"
    if check.faults:
        mark = "[yellow]warn[/]" if check.is_harmless else "[bold red]fail[/]"
    faults = f"; {counted(len(check.faults), 'fault')}" if check.faults and not check.is_harmless else ""
    console.print(f"{mark}  {check.name:<11}  {check.checked}{faults}", highlight=False)
    for subject, fault in list(check.faults.items())[:SHOWN]:
        console.print(f"      {'':<11}  {escape(subject)}: {escape(fault)}", highlight=False)
    if (more := len(check.faults) - SHOWN) > 0:
        console.print(f"      {'':<11}  and {more} more", highlight=False)


def _settings(where: ServiceLocation | None) -> ServeConfig:
    from tinsmith.cli.serve import read_service_settings

    where = where or ServiceLocation()
    return read_service_settings(where.config, (), {"data": where.data, "database": where.database})
