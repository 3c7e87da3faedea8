"""Runs the migrations on the connection that `database.migrate` provides.

From the command line, to write a new migration, it runs them on the database of `-x url=…` (see CONTRIBUTING.md).
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from tinsmith.service.storage.tables import META


def _run(db: Connection) -> None:
    # render_as_batch: SQLite cannot alter a column, so alembic copies the table instead.
    context.configure(connection=db, target_metadata=META, render_as_batch=True, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()


provided = context.config.attributes.get("connection")
if provided is not None:
    _run(provided)
else:
    with create_engine(context.get_x_argument(as_dictionary=True)["url"]).begin() as connection:
        _run(connection)
