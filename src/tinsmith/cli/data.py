"""The commands `tinsmith data …`: prepare datasets as files for run files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from tinsmith.plurals import counted

app = App(name="data", help="Prepare datasets as JSONL files for run files.")


@app.command
def countdown(
    *,
    out: Path = Path("data/countdown"),
    source: Literal["auto", "hub", "generate"] = "auto",
    limit: Annotated[int | None, Parameter(show_default=False)] = None,
    seed: int = 0,
) -> None:
    """Write the splits train, test, stage2 and stage3 of the number game Countdown, for the reward `countdown`.

    Parameters
    ----------
    out
        Folder of the files; files of the same names are replaced.
    source
        hub: Jiayi-Pan/Countdown-Tasks-3to4; generate: solvable tasks of the same form; auto: the hub if it responds.
    limit
        Largest number of rows in each split, for a trial. Default: all.
    seed
        Seed of stage2 and stage3, and of generated tasks.
    """
    from tinsmith.rl.data.countdown import DATASET, prepare_countdown

    data = prepare_countdown(source, limit, seed)
    if data.reason:
        _print(f"{DATASET} is not used: {data.reason}.")
    _print(f"Tasks: {DATASET}" if data.origin == "hub" else f"Tasks: generated with seed {seed}, each with a solution")
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in data.splits.items():
        path = out / f"{name}.jsonl"
        _write_jsonl(path, rows)
        _print(f"{path}: {counted(len(rows), 'row')}")


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a row on each line. An interrupted call leaves no incomplete file of this name."""
    temporary = path.with_name(f"{path.name}.part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
