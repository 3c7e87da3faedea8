"""Payloads in files, the time of the last fetch of a result, and an index by the end of requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Forward only: going back is restoring a copy of the database."""
    op.create_table(
        "payloads",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("segment", sa.BigInteger(), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
    )
    op.create_index("payloads_of_model", "payloads", ["model_id", "seq"])
    op.add_column("requests", sa.Column("fetched", sa.Float()))
    op.create_index("requests_by_end", "requests", ["done"])
