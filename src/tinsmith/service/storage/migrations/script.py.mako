"""${message}."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    """Forward only: going back is restoring a copy of the database."""
    ${upgrades if upgrades else "pass"}
