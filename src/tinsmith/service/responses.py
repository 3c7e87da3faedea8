"""JSON of records in the management API. Times have a UTC offset: clients compare them with aware datetimes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tinsmith.service.storage.records import Checkpoint, Model
from tinsmith.service.tenancy.signing import urn

DEFAULT_PROJECT = "default"
"""Project of sessions that were assigned to none."""

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


def rfc3339(seconds: float) -> str:
    """Seconds since 1970 as an RFC 3339 time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def metadata_texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Metadata with its values as text, as the protocol has it."""
    return {key: value if isinstance(value, str) else str(value) for key, value in (metadata or {}).items()} or None


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """The protocol's Checkpoint."""
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


def training_run_json(
    model: Model, checkpoints: list[Checkpoint], last_used: float, *, corrupted: bool, own: bool
) -> dict[str, Any]:
    """The protocol's TrainingRun; `checkpoints` are those visible to the caller, newest first."""
    newest = {checkpoint.kind: checkpoint_json(checkpoint) for checkpoint in reversed(checkpoints)}
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
