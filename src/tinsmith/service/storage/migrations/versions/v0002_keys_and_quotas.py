"""Keys, kept as hashes, and what their tenants may have."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Forward only: going back is restoring a copy of the database."""
    op.create_table(
        "keys",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False, unique=True),
        sa.Column("admin", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("expires", sa.Float()),
        sa.Column("revoked", sa.Float()),
    )
    op.create_table(
        "quotas",
        sa.Column("owner", sa.String(), primary_key=True),
        sa.Column("models", sa.BigInteger()),
        sa.Column("checkpoint_bytes", sa.BigInteger()),
        sa.Column("queued", sa.BigInteger()),
        sa.Column("tokens_per_minute", sa.BigInteger()),
    )
