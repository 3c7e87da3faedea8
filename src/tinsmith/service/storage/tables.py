"""The database's tables, a column for each field of a record. Ids and seq_ids are 64 bit: asample counts to 10^18.

A change here needs a migration in `migrations/versions`; a test compares the two.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    false,
)

META = MetaData()

SESSIONS = Table(
    "sessions",
    META,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("seen", Float, nullable=False),
    Column("idempotency_key", String),
    Column("tags", JSON, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("project_id", String),
    Column("display_name", String),
    Column("ended", String),
    Column("detail", String),
)

MODELS = Table(
    "models",
    META,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("session_id", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("created", Float, nullable=False),
    Column("metadata", JSON),
    Column("state", String, nullable=False),
    Column("captured", String),
    Column("captured_optimizer", Boolean, nullable=False),
    Column("covered", BigInteger, nullable=False),
    Column("used", Float),
    Column("inflight", String),
)

SAMPLERS = Table(
    "samplers",
    META,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("session_id", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("model_path", String),
    Column("version", String),
    Column("inflight_of", String),
    Column("joined", BigInteger, nullable=False, server_default="0"),
)

CHECKPOINTS = Table(
    "checkpoints",
    META,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("run", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("name", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("created", Float, nullable=False),
    Column("made_by", String, nullable=False),
    Column("optimizer", Boolean, nullable=False),
    Column("ready", Boolean, nullable=False),
    Column("deleted", Boolean, nullable=False),
    Column("public", Boolean, nullable=False, server_default=false()),
    Column("size_bytes", BigInteger, nullable=False),
    Column("expires", Float),
    Column("metadata", JSON),
)

CUSTOM_LOSSES = Table(
    "custom_losses",
    META,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("session_id", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("graph", String, nullable=False),
)

REQUESTS = Table(
    "requests",
    META,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("model_id", String, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("kind", String, nullable=False),
    Column("created", Float, nullable=False),
    # pending | done | failed
    Column("state", String, nullable=False),
    # Until a captured state covers the request; then it is no longer needed.
    Column("payload", LargeBinary),
    # Requests that ran in one pass share it, so that a replay packs them alike.
    Column("batch", BigInteger, nullable=False),
    Column("done", Float),
    Column("status", BigInteger),
    Column("media", String),
    # The result, until it is too old to be fetched.
    Column("body", LargeBinary),
    Index("requests_of_model", "model_id", "seq"),
)

KEYS = Table(
    "keys",
    META,
    Column("id", Integer, primary_key=True),
    Column("name", String, nullable=False),
    Column("owner", String, nullable=False),
    Column("hash", String, nullable=False, unique=True),
    Column("admin", Boolean, nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("revoked", Float),
)

QUOTAS = Table(
    "quotas",
    META,
    Column("owner", String, primary_key=True),
    # Each without limit where it is null.
    Column("models", BigInteger),
    Column("checkpoint_bytes", BigInteger),
    Column("queued", BigInteger),
    Column("tokens_per_minute", BigInteger),
)

# What was done to things that outlast a request, and by whom.
AUDIT = Table(
    "audit",
    META,
    Column("id", Integer, primary_key=True),
    Column("owner", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("event", String, nullable=False),
    Column("details", JSON, nullable=False),
    Index("audit_of_owner", "owner", "at"),
)

# When each request came, began and ended, and how many tokens it took.
SPANS = Table(
    "spans",
    META,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("session_id", String, nullable=False),
    Column("base_model", String, nullable=False),
    # The model or the sampling session.
    Column("track", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("state", String, nullable=False),
    Column("submitted", Float, nullable=False),
    Column("begun", Float, nullable=False),
    Column("ended", Float, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Index("spans_of_session", "session_id"),
    Index("spans_by_end", "ended"),
)

# How much of what was used in which hour (since 1970).
USAGE = Table(
    "usage",
    META,
    Column("owner", String, primary_key=True),
    Column("hour", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String, primary_key=True),
    Column("base_model", String, primary_key=True),
    Column("session_id", String, primary_key=True),
    Column("quantity", BigInteger, nullable=False),
)

# From when until when each named checkpoint took its bytes; still, if it has not ended.
STORED = Table(
    "stored",
    META,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("session_id", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("begun", Float, nullable=False),
    Column("ended", Float),
    Index("stored_of_owner", "owner"),
)
