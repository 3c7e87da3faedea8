"""The tables of 0.1.0.

It has the last number of the development versions, whose tables are these. Databases with lower numbers are refused.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = None

SCHEMA = sa.MetaData()

sa.Table(
    "sessions",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("seen", sa.Float, nullable=False),
    sa.Column("idempotency_key", sa.String),
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("metadata", sa.JSON, nullable=False),
    sa.Column("project_id", sa.String),
    sa.Column("display_name", sa.String),
    sa.Column("ended", sa.String),
    sa.Column("detail", sa.String),
)

sa.Table(
    "models",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("session_id", sa.String, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("lora", sa.JSON, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("metadata", sa.JSON),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("captured", sa.String),
    sa.Column("captured_optimizer", sa.Boolean, nullable=False),
    sa.Column("captured_digest", sa.String),
    sa.Column("covered", sa.BigInteger, nullable=False),
    sa.Column("used", sa.Float),
    sa.Column("inflight", sa.String),
)

sa.Table(
    "samplers",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("session_id", sa.String, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("model_path", sa.String),
    sa.Column("version", sa.String),
    sa.Column("inflight_of", sa.String),
    sa.Column("joined", sa.BigInteger, nullable=False, server_default="0"),
)

sa.Table(
    "checkpoints",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("run", sa.String, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("lora", sa.JSON, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("made_by", sa.String, nullable=False),
    sa.Column("optimizer", sa.Boolean, nullable=False),
    sa.Column("ready", sa.Boolean, nullable=False),
    sa.Column("deleted", sa.Boolean, nullable=False),
    sa.Column("public", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("expires", sa.Float),
    sa.Column("metadata", sa.JSON),
    sa.Column("digest", sa.String),
)

sa.Table(
    "objects",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("created", sa.Float, nullable=False),
)

sa.Table(
    "custom_losses",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("session_id", sa.String, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("graph", sa.String, nullable=False),
)

sa.Table(
    "requests",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("model_id", sa.String, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("payload", sa.LargeBinary),
    sa.Column("batch", sa.BigInteger, nullable=False),
    sa.Column("done", sa.Float),
    sa.Column("status", sa.BigInteger),
    sa.Column("media", sa.String),
    sa.Column("body", sa.LargeBinary),
    sa.Column("fetched", sa.Float),
    sa.Index("requests_of_model", "model_id", "seq"),
    sa.Index("requests_by_end", "done"),
)

sa.Table(
    "payloads",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("model_id", sa.String, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("segment", sa.BigInteger, nullable=False),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Index("payloads_of_model", "model_id", "seq"),
)

sa.Table(
    "keys",
    SCHEMA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("hash", sa.String, nullable=False, unique=True),
    sa.Column("admin", sa.Boolean, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("expires", sa.Float),
    sa.Column("revoked", sa.Float),
)

sa.Table(
    "quotas",
    SCHEMA,
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("models", sa.BigInteger),
    sa.Column("checkpoint_bytes", sa.BigInteger),
    sa.Column("queued", sa.BigInteger),
    sa.Column("tokens_per_minute", sa.BigInteger),
)

sa.Table(
    "audit",
    SCHEMA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("event", sa.String, nullable=False),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Index("audit_of_owner", "owner", "at"),
)

sa.Table(
    "spans",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("session_id", sa.String, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("track", sa.String, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("submitted", sa.Float, nullable=False),
    sa.Column("begun", sa.Float, nullable=False),
    sa.Column("ended", sa.Float, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Index("spans_of_session", "session_id"),
    sa.Index("spans_by_end", "ended"),
)

sa.Table(
    "usage",
    SCHEMA,
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("base_model", sa.String, primary_key=True),
    sa.Column("session_id", sa.String, primary_key=True),
    sa.Column("quantity", sa.BigInteger, nullable=False),
)

sa.Table(
    "stored",
    SCHEMA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("session_id", sa.String, nullable=False),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("begun", sa.Float, nullable=False),
    sa.Column("ended", sa.Float),
    sa.Index("stored_of_owner", "owner"),
)


def upgrade() -> None:
    """Forward only: going back is restoring a copy of the database."""
    SCHEMA.create_all(op.get_bind(), checkfirst=False)
