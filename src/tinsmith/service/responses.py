"""Records as the management API shows them. Times carry their zone: clients compare them with aware ones."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tinsmith.service.storage.records import Checkpoint, Model
from tinsmith.service.tenancy.signing import urn

DEFAULT_PROJECT = "default"
"""Where a session is that was put into no project."""

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


def rfc3339(seconds: float) -> str:
    """Seconds since 1970 as an RFC 3339 time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def metadata_texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Metadata as the protocol shows it: text for every key."""
    return {key: value if isinstance(value, str) else str(value) for key, value in (metadata or {}).items()} or None


def checkpoint_view(checkpoint: Checkpoint) -> dict[str, Any]:
    """A Checkpoint of the protocol."""
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": rfc3339(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.metadata,
        "expires_at": rfc3339(checkpoint.expires) if checkpoint.expires is not None else None,
    }


def run_view(
    model: Model, checkpoints: list[Checkpoint], last_used: float, *, corrupted: bool, own: bool
) -> dict[str, Any]:
    """A TrainingRun of the protocol; `checkpoints` are those that may be seen, newest first."""
    newest = {one.kind: checkpoint_view(one) for one in reversed(checkpoints)}
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": urn(model.owner),
        "is_lora": True,
        "corrupted": corrupted,
        "lora_rank": model.lora.rank,
        "last_request_time": rfc3339(last_used),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": metadata_texts(model.metadata) if own else None,
    }
