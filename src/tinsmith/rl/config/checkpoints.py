"""Settings of checkpoints: when a run saves them, how many it keeps, and which one it resumes from."""

from __future__ import annotations

import re

from pydantic import Field

from tinsmith.settings import Settings

Checkpoints = tuple[tuple[str, ...], ...]
"""Checkpoints, oldest first; each is the tinker:// paths of its states: the policy's and, if any, the critic's."""


class CheckpointConfig(Settings):
    """When to save checkpoints, which an interrupted run resumes from."""

    every: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0 saves only at the end of the run."""
    ttl_seconds: int | None = Field(default=604_800, ge=3600)
    """Seconds until the server deletes a checkpoint (default one week); null: never. The last one never expires."""
    keep: int = Field(default=0, ge=0)
    """Number of newest checkpoints to keep; older ones are deleted. 0 keeps all."""

    def cut(self, checkpoints: Checkpoints) -> tuple[Checkpoints, Checkpoints]:
        """Split `checkpoints`, oldest first, into (to delete, to keep)."""
        excess = max(0, len(checkpoints) - self.keep) if self.keep else 0
        return checkpoints[:excess], checkpoints[excess:]


def check_resume_from(resume_from: str) -> None:
    """Raise ValueError if the setting names neither a state checkpoint nor a state file."""
    if re.fullmatch(r"tinker://[^/]+/sampler_weights/.+", resume_from):
        raise ValueError("weights saved for sampling have no optimizer state; set a tinker://RUN/weights/NAME path")
    if resume_from and not re.fullmatch(r"tinker://[^/]+/weights/[^/]+|.+\.json", resume_from):
        raise ValueError(
            "it names no checkpoint; set tinker://RUN/weights/NAME or a state file FOLDER/checkpoints/step-000010.json"
        )
