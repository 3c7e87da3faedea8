"""Objects of an object store, and the digests of checkpoints and captured states in it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Forward only: going back is restoring a copy of the database."""
    op.create_table(
        "objects",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("created", sa.Float(), nullable=False),
    )
    op.add_column("checkpoints", sa.Column("digest", sa.String()))
    op.add_column("models", sa.Column("captured_digest", sa.String()))
