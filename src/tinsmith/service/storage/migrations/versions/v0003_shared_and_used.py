"""Checkpoints can be published, sessions end with a word, and what happened is written down."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Forward only: going back is restoring a copy of the database."""
    op.add_column("checkpoints", sa.Column("public", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("models", sa.Column("used", sa.Float()))
    op.add_column("sessions", sa.Column("detail", sa.String()))
    _what_happened()
    _what_was_used()


def _what_happened() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
    )
    op.create_index("audit_of_owner", "audit", ["owner", "at"])
    op.create_table(
        "spans",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("track", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("submitted", sa.Float(), nullable=False),
        sa.Column("begun", sa.Float(), nullable=False),
        sa.Column("ended", sa.Float(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
    )
    op.create_index("spans_of_session", "spans", ["session_id"])
    op.create_index("spans_by_end", "spans", ["ended"])


def _what_was_used() -> None:
    op.create_table(
        "usage",
        sa.Column("owner", sa.String(), primary_key=True),
        sa.Column("hour", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(), primary_key=True),
        sa.Column("base_model", sa.String(), primary_key=True),
        sa.Column("session_id", sa.String(), primary_key=True),
        sa.Column("quantity", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "stored",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("begun", sa.Float(), nullable=False),
        sa.Column("ended", sa.Float()),
    )
    op.create_index("stored_of_owner", "stored", ["owner"])
