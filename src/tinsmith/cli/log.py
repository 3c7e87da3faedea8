"""The command `tinsmith log`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from tinsmith.errors import ConfigError


def log(
    folder: Path | None = None,
    /,
    *,
    keyword: Annotated[str | None, Parameter(name=("--keyword", "-k"))] = None,
    last: Annotated[int | None, Parameter(name=("--last", "-n"))] = None,
    level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"] | None, Parameter(name=("--level", "-l"))] = None,
    follow: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Show the log of a run.

    Parameters
    ----------
    folder
        Folder of the run. Default: the most recent one under runs/.
    keyword
        Show only entries that contain this text, ignoring case.
    last
        Show only this many of the last entries.
    level
        Show only entries of this level and above.
    follow
        Show new entries as they are written, until interrupted.
    """
    from tinsmith.rl.record import logs
    from tinsmith.rl.record.layout import Layout

    place = folder or latest_run(Path("runs"))
    if not (file := Layout(place).log).exists():
        raise ConfigError(
            f"There is no {file.name} in {place}.", "Name the folder of a run. Example: tinsmith log runs/demo."
        )
    for entry in logs.read(place, keyword=keyword or "", last=last or 0, level=level or ""):
        sys.stdout.write(entry + "\n")
    if follow:
        for entry in logs.follow(place, keyword=keyword or "", level=level or ""):
            sys.stdout.write(entry + "\n")
            sys.stdout.flush()


def latest_run(runs: Path) -> Path:
    """The folder of the most recent run in `runs`. Raises ConfigError if there is none."""
    from tinsmith.rl.record.layout import Layout

    files = list(runs.glob(f"**/{Layout(runs).log.name}"))
    if not files:
        raise ConfigError(f"There is no run in {runs}.", "Name the folder of a run. Example: tinsmith log runs/demo.")
    return max(files, key=lambda file: file.stat().st_mtime).parent
