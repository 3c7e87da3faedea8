"""Databases of the service tests: SQLite in the data folder, or one PostgreSQL database for each data folder.

`postgres` runs a PostgreSQL server, `url_of` is the `database` setting of a data folder, `opened` opens its store and
`beside` a second connection.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import socket
import subprocess
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, create_engine

from tinsmith.service.storage.store import Store, open_store

SERVER = "TINSMITH_TEST_POSTGRES"
"""Environment variable with the port of the PostgreSQL server; tests use SQLite if it is not set."""


def free_port() -> int:
    """A port that nothing uses, and that this process has not returned before.

    It is below those that the system gives to connections and to servers that ask for any port: it gives none of them
    away before the server of the test binds it, or between a server and the next one on the same port.
    """
    for port in _ports():
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("All ports are in use.")


@functools.cache
def _ports() -> Iterator[int]:
    """Ports in an order of this process, so that several processes rarely try the same one at once."""
    return iter(random.SystemRandom().sample(range(10_000, 32_768), 22_768))


def url_of(data: Path) -> str | None:
    """The `database` setting for a data folder, None for SQLite. Creates the PostgreSQL database once."""
    port = os.environ.get(SERVER)
    if port is None:
        return None
    name = f"t{zlib.crc32(str(data.resolve()).encode()):08x}"
    with psycopg.connect(_conninfo(port), autocommit=True) as db:
        if not db.execute("select 1 from pg_database where datname = %s", [name]).fetchall():
            db.execute(f"create database {name}")  # type: ignore[call-overload]
    return f"postgresql+psycopg://postgres@127.0.0.1:{port}/{name}"


@asynccontextmanager
async def opened(data: Path) -> AsyncIterator[Store]:
    """The store of a data folder."""
    store = await open_store(data, url_of(data))
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def beside(data: Path) -> Iterator[Engine]:
    """A second connection to the database of a data folder."""
    engine = create_engine(url_of(data) or f"sqlite:///{data / 'tinsmith.db'}")
    yield engine
    engine.dispose()


@contextmanager
def postgres() -> Iterator[str]:
    """Run a new PostgreSQL server and return its port. Skips if PostgreSQL is not installed."""
    tools = _tools()
    if tools is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-postgres-"))
    # PostgreSQL refuses to run as root; the package creates the user postgres.
    prefix: list[str] = []
    if os.geteuid() == 0:
        prefix = ["runuser", "-u", "postgres", "--"]
        shutil.chown(folder, "postgres")
    port, data = str(free_port()), str(folder / "data")
    options = f"-p {port} -h 127.0.0.1 -k '' -c fsync=off -c full_page_writes=off -c max_connections=200"
    try:
        make = [*prefix, str(tools / "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"]
        subprocess.run(make, check=True, capture_output=True, cwd=folder)
        start = [*prefix, str(tools / "pg_ctl"), "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start"]
        subprocess.run(start, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        yield port
        stop = [*prefix, str(tools / "pg_ctl"), "-D", data, "-m", "immediate", "stop"]
        subprocess.run(stop, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tools() -> Path | None:
    """Folder of initdb and pg_ctl. Debian installs them outside the PATH, in a folder for each version."""
    packaged = [file.parent for file in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    on_path = shutil.which("initdb")
    return packaged[-1] if packaged else Path(on_path).parent if on_path else None


def _conninfo(port: str) -> str:
    return f"host=127.0.0.1 port={port} user=postgres dbname=postgres"
