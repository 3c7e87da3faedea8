"""How alembic runs the migrations: on the connection that `database.migrate` gives it.

From the command line, to write a new one, on the database of `-x url=…` (see CONTRIBUTING.md).
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from tinsmith.service.storage.tables import META


def _run(db: Connection) -> None:
    # render_as_batch: SQLite cannot alter a column; alembic writes the table anew instead.
    context.configure(connection=db, target_metadata=META, render_as_batch=True, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    _run(given)
else:
    with create_engine(context.get_x_argument(as_dictionary=True)["url"]).begin() as connection:
        _run(connection)
