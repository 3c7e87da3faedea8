"""Which database a test's service uses: SQLite in its data folder, or one of its own on a PostgreSQL started here."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, create_engine

SERVER = "TINSMITH_TEST_POSTGRES"
"""Port of the PostgreSQL that tests run on; not set: SQLite."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return made.getsockname()[1]


def url_of(data: Path) -> str | None:
    """The setting `database` for a data folder: the same folder has the same database."""
    port = os.environ.get(SERVER)
    if port is None:
        return None
    name = f"t{zlib.crc32(str(data.resolve()).encode()):08x}"
    with psycopg.connect(_conninfo(port), autocommit=True) as db:
        if not db.execute("select 1 from pg_database where datname = %s", [name]).fetchall():
            db.execute(f"create database {name}")  # type: ignore[call-overload]
    return f"postgresql+psycopg://postgres@127.0.0.1:{port}/{name}"


@contextmanager
def beside(data: Path) -> Iterator[Engine]:
    """The database as somebody else sees it."""
    engine = create_engine(url_of(data) or f"sqlite:///{data / 'tinsmith.db'}")
    yield engine
    engine.dispose()


@contextmanager
def postgres() -> Iterator[str]:
    """The port of a fresh PostgreSQL server. Skips where Debian's `postgresql` is not installed."""
    tools = _tools()
    if tools is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-postgres-"))
    # It refuses to run as root; the package made it a user.
    be: list[str] = []
    if os.geteuid() == 0:
        be = ["runuser", "-u", "postgres", "--"]
        shutil.chown(folder, "postgres")
    port, data = str(free_port()), str(folder / "data")
    options = f"-p {port} -h 127.0.0.1 -k '' -c fsync=off -c full_page_writes=off -c max_connections=200"
    try:
        make = [*be, str(tools / "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"]
        subprocess.run(make, check=True, capture_output=True, cwd=folder)
        start = [*be, str(tools / "pg_ctl"), "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start"]
        subprocess.run(start, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        yield port
        stop = [*be, str(tools / "pg_ctl"), "-D", data, "-m", "immediate", "stop"]
        subprocess.run(stop, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tools() -> Path | None:
    """Debian keeps them out of the PATH, by version."""
    kept = [one.parent for one in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    found = shutil.which("initdb")
    return kept[-1] if kept else Path(found).parent if found else None


def _conninfo(port: str) -> str:
    return f"host=127.0.0.1 port={port} user=postgres dbname=postgres"
