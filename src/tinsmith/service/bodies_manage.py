"""The JSON bodies of the management API, as shapes only; unknown fields are ignored as everywhere."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, Field

from tinsmith.service.bodies import Loose


class WeightsInfoBody(Loose):
    """weights_info."""

    tinker_path: str


class CopyBody(Loose):
    """copy_weights, into a project or into a place in a session."""

    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class TtlBody(Loose):
    """checkpoints/…/ttl: null, which must be said, takes the end away."""

    ttl_seconds: int | None


class LoanBody(Loose):
    """checkpoints/…/access_token."""

    ttl_seconds: int = 86_400


class ProjectBody(Loose):
    """sessions/{id}/project."""

    project_id: str = Field(min_length=1)


class SearchOwner(Loose):
    """Whose sessions to search."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = Field(default_factory=list)


class StatusQuery(Loose):
    """One way a session may stand."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[str] | None = None


class SearchCursor(Loose):
    """Where the next page begins."""

    last_created_at: AwareDatetime
    last_session_id: str


class SearchBody(Loose):
    """sessions/search."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: str | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[StatusQuery] | None = None
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None
