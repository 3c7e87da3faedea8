"""The command `tinsmith log`: what a run wrote to its own log. Imports stand inside it."""

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
        The run's folder; without it, the one under runs/ that was written to last.
    keyword
        Only entries that hold this, in any case.
    last
        Only so many entries, the last ones.
    level
        Only entries of this level and above.
    follow
        Go on showing entries as they are written, until interrupted.
    """
    from tinsmith.rl import logs

    place = folder or _latest(Path("runs"))
    if not (place / logs.FILE).exists():
        raise ConfigError(
            f"There is no {logs.FILE} in {place}.", "Name the folder of a run, as in: tinsmith log runs/demo."
        )
    for entry in logs.read(place, keyword=keyword or "", last=last or 0, level=level or ""):
        sys.stdout.write(entry + "\n")
    if follow:
        for entry in logs.follow(place, keyword=keyword or "", level=level or ""):
            sys.stdout.write(entry + "\n")
            sys.stdout.flush()


def _latest(runs: Path) -> Path:
    from tinsmith.rl import logs

    found = list(runs.glob(f"**/{logs.FILE}"))
    if not found:
        raise ConfigError(f"There is no run in {runs}.", "Name the folder of a run, as in: tinsmith log runs/demo.")
    return max(found, key=lambda file: file.stat().st_mtime).parent
