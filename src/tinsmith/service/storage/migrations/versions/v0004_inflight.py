"""Inflight sampling sessions, and clients that share a sampling session."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Sampling sessions that are there stay on their version, and nobody has joined them."""
    op.add_column("models", sa.Column("inflight", sa.String()))
    op.add_column("samplers", sa.Column("inflight_of", sa.String()))
    op.add_column("samplers", sa.Column("joined", sa.BigInteger(), nullable=False, server_default="0"))
