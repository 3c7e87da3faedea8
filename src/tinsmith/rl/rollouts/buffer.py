"""The section `buffer` of a run file: where batches wait between sampling and training, and the store of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from sqlalchemy import URL

from tinsmith.rl.rollouts.replay import BufferSettings
from tinsmith.rl.rollouts.store import MemoryStore, SqlStore, Store


class MemoryConfig(BufferSettings):
    """Batches in memory, for a process that both samples and trains; checkpoints hold the waiting batches."""

    type: Literal["memory"] = "memory"


class FileConfig(BufferSettings):
    """Batches in a SQLite file. They outlive the process and other processes of this machine can open them."""

    type: Literal["file"] = "file"
    path: str = ""
    """Folder of the file `batches.db`; empty: `buffer` in the run folder."""


class SqlConfig(BufferSettings):
    """Batches in a database. They outlive the process and other processes can open them."""

    type: Literal["sql"] = "sql"
    url: str
    """SQLAlchemy URL, such as sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME."""
    run: str = Field(default="", max_length=200)
    """Name that the rows are stored under, equal in all processes; empty: the name of the run."""


BufferConfig = Annotated[MemoryConfig | FileConfig | SqlConfig, Field(discriminator="type")]


def open_store(config: BufferConfig, folder: Path, name: str, *, shared: bool) -> Store:
    """The store of run `name`. Raises ConfigError if its database cannot be opened.

    `folder`: default place of its file. `shared`: several processes open it, so that the state of the queue is in the
    database too.
    """
    match config:
        case FileConfig():
            path = Path(config.path).expanduser() if config.path else folder
            path.mkdir(parents=True, exist_ok=True)
            disk = SqlStore(URL.create("sqlite", database=str(path / "batches.db")), "")
        case SqlConfig():
            disk = SqlStore(config.url, config.run or name)
        case _:
            return MemoryStore()
    return disk if shared else MemoryStore(disk)
