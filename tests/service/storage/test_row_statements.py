"""Rows of requests in few statements: their number, their way to the rows, and the first result of a request."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from tests.service.storage.test_store import MODEL
from tests.service.storage.test_writer import PAYLOAD, opened, request
from tinsmith.errors import ConfigError
from tinsmith.service.storage import batch, row_statements
from tinsmith.service.storage.database import open_engine
from tinsmith.service.storage.records import FutureResult
from tinsmith.service.storage.row_statements import MAX_ROWS
from tinsmith.service.storage.store import FinishedRequest, Store

COUNT = MAX_ROWS + 7
STATEMENTS = 4
"""Executions for COUNT rows: of 64, 4, 2 and 1."""


def executed(store: Store) -> Callable[[str], int]:
    """Function that counts the executions of statements with this beginning since this call."""
    texts: list[str] = []

    def record(_db: Any, _cursor: Any, text: str, *_: Any) -> None:
        texts.append(text)

    event.listen(store._sync_engine, "before_cursor_execute", record)
    return lambda start: sum(text.startswith(start) for text in texts)


def sqlite_only(store: Store) -> None:
    if store.database.dialect.name != "sqlite":
        pytest.skip("PostgreSQL's driver sends the rows of a statement together")


def test_many_rows_take_few_statements(tmp_path: Path) -> None:
    """Break `_execute_on_sqlite`: `count = 1`."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            sqlite_only(store)
            await store.put(MODEL)
            count = executed(store)
            first = asyncio.create_task(store.put(MODEL))  # the others wait for its commit, and share one
            await asyncio.sleep(0)
            assert all(await asyncio.gather(*(store.accept(request(seq), PAYLOAD) for seq in range(COUNT))))
            await first
            assert count("INSERT INTO requests") <= STATEMENTS + 1
            ends = [
                FinishedRequest(request=request(seq), result=FutureResult(body=b"%d" % seq)) for seq in range(COUNT)
            ]
            await store.finish(ends)
            assert count("UPDATE requests") == STATEMENTS
            for seq in range(COUNT):
                store.mark_fetched(request(seq).id)
            await store.put(MODEL)
            assert count("UPDATE requests") == 2 * STATEMENTS
            for seq in (0, MAX_ROWS - 1, MAX_ROWS, COUNT - 1):
                assert await store.result(request(seq).id, "o") == ("done", FutureResult(body=b"%d" % seq))

    asyncio.run(main())


@pytest.mark.parametrize("statement", [batch._FINISH, batch._FINISH_AND_DROP, batch._FETCHED])
def test_updates_of_many_rows_find_each_by_its_key(tmp_path: Path, statement: row_statements.RowStatement) -> None:
    """A scan for each row would make a large database slow. Break `_update_requests`: `requests.id || ''`."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            sqlite_only(store)
            rows, width = 8, len(statement.columns)
            text = row_statements._text(statement.sqlite, width, rows)
            plan = await store.run(
                lambda db: db.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", ("x",) * rows * width).all()
            )
            steps = [step.detail for step in plan]
            assert any(step.startswith("SEARCH requests USING") and "(id=?)" in step for step in steps), steps
            assert not any(step.startswith("SCAN requests") for step in steps), steps

    asyncio.run(main())


def test_first_result_of_a_request_counts_also_in_one_write(tmp_path: Path) -> None:
    """Break `_flush`: leave out `reversed`."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put(MODEL)
            await store.accept(request(1), PAYLOAD)
            results = [FutureResult(body=body) for body in (b"first", b"second")]
            await store.finish([FinishedRequest(request=request(1), result=result) for result in results])
            assert await store.result(request(1).id, "o") == ("done", results[0])

    asyncio.run(main())


def test_old_sqlite_is_refused_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break `open_engine`: leave out the comparison."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 31, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.31.1")
    with pytest.raises(ConfigError, match=r"3\.31\.1"):
        open_engine(tmp_path, None)
