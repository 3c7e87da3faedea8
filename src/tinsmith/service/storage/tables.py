"""Tables of the database; the columns of a record's table are its fields.

Sequence numbers are 64 bit: seq_ids of asample go up to 10^18. A change here needs a migration in
`migrations/versions`; a test compares the two.
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
    Column("captured_digest", String),
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
    Column("digest", String),
)

# Objects of the object store, those that nothing refers to any more included.
OBJECTS = Table(
    "objects",
    META,
    Column("id", String, primary_key=True),
    Column("created", Float, nullable=False),
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
    # pending, done or failed
    Column("state", String, nullable=False),
    # Deleted when a captured state covers the request.
    Column("payload", LargeBinary),
    # Equal for requests that ran in one pass: a replay packs the same requests together.
    Column("batch", BigInteger, nullable=False),
    Column("done", Float),
    Column("status", BigInteger),
    Column("media", String),
    # The result; deleted when its retention time is over.
    Column("body", LargeBinary),
    # When a client last fetched the result.
    Column("fetched", Float),
    Index("requests_of_model", "model_id", "seq"),
    Index("requests_by_end", "done"),
)

# Payloads of requests that are in a file, in place of the column `payload` (payload_files.py).
PAYLOADS = Table(
    "payloads",
    META,
    Column("id", String, primary_key=True),
    Column("model_id", String, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("segment", BigInteger, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Index("payloads_of_model", "model_id", "seq"),
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
    # Null is unlimited.
    Column("models", BigInteger),
    Column("checkpoint_bytes", BigInteger),
    Column("queued", BigInteger),
    Column("tokens_per_minute", BigInteger),
)

# Audit log: events of checkpoints, keys and projects, with the actor.
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

# Timing and token counts of finished requests.
SPANS = Table(
    "spans",
    META,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("session_id", String, nullable=False),
    Column("base_model", String, nullable=False),
    # Id of the model or the sampling session.
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

# Usage counters; `hour` counts from 1970.
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

# Storage time of named checkpoints; `ended` is null while a checkpoint exists.
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
