"""The tables as they were before there were migrations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Forward only: going back is restoring a copy of the database."""
    _what_clients_hold()
    _what_is_kept()


def _what_clients_hold() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("seen", sa.Float(), nullable=False),
        sa.Column("idempotency_key", sa.String()),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("project_id", sa.String()),
        sa.Column("display_name", sa.String()),
        sa.Column("ended", sa.String()),
    )
    op.create_table(
        "models",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("metadata", sa.JSON()),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("captured", sa.String()),
        sa.Column("captured_optimizer", sa.Boolean(), nullable=False),
        sa.Column("covered", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "samplers",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("model_path", sa.String()),
        sa.Column("version", sa.String()),
    )


def _what_is_kept() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("made_by", sa.String(), nullable=False),
        sa.Column("optimizer", sa.Boolean(), nullable=False),
        sa.Column("ready", sa.Boolean(), nullable=False),
        sa.Column("deleted", sa.Boolean(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("expires", sa.Float()),
        sa.Column("metadata", sa.JSON()),
    )
    op.create_table(
        "requests",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("payload", sa.LargeBinary()),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("done", sa.Float()),
        sa.Column("status", sa.BigInteger()),
        sa.Column("media", sa.String()),
        sa.Column("body", sa.LargeBinary()),
    )
    op.create_index("requests_of_model", "requests", ["model_id", "seq"])
