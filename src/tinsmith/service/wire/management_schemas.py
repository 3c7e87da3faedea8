"""JSON bodies of the management API: checkpoints, projects and the search of sessions."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, Field

from tinsmith.service.wire.schemas import Id, Label, Number, WireModel


class WeightsInfoBody(WireModel):
    """weights_info."""

    tinker_path: Id


class CopyBody(WireModel):
    """copy_weights, into a project or as a model of a session."""

    source_path: Id
    destination_project_id: Label | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class TtlBody(WireModel):
    """checkpoints/…/ttl; an explicit null removes the expiry."""

    ttl_seconds: int | None


class LoanBody(WireModel):
    """checkpoints/…/access_token."""

    ttl_seconds: int = 86_400


class ProjectBody(WireModel):
    """sessions/{id}/project."""

    project_id: Label = Field(min_length=1)


class SearchOwner(WireModel):
    """The owners whose sessions to search."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = Field(default_factory=list)


class StatusQuery(WireModel):
    """A session status to match."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[str] | None = None


class SearchCursor(WireModel):
    """Start of the next page."""

    last_created_at: AwareDatetime
    last_session_id: Id


class SearchBody(WireModel):
    """sessions/search."""

    session_id: Id | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: Label | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[StatusQuery] | None = None
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None
