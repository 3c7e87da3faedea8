"""Settings of checkpoints: when a run saves them, which ones it keeps, and which one it resumes from."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from tinsmith.settings import Needs, Settings

Checkpoints = tuple[tuple[str, ...], ...]
"""Checkpoints, oldest first; each is the tinker:// paths of its states: the policy's and, if any, the critic's."""


class CheckpointConfig(Settings):
    """When to save checkpoints, which an interrupted run resumes from."""

    every: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0 saves only at the end of the run."""
    ttl_seconds: int | None = Field(default=604_800, ge=3600)
    """Seconds until the server deletes a checkpoint (default one week); null: never. The last one never expires."""
    keep: Annotated[int, Field(ge=0)] | Literal["best"] = 0
    """Number of newest checkpoints to keep; older ones are deleted. 0 keeps all. `best` keeps the newest one and the
    one with the best evaluation, whose weights are then the result of the run, or of the stage."""
    metric: Annotated[str, Needs("keep", ("best",))] = "eval/reward/mean"
    """Metric of evaluations that says which checkpoint is the best."""
    better: Annotated[Literal["higher", "lower"], Needs("keep", ("best",))] = "higher"
    """Whether higher or lower values of `metric` are better. Of equal ones, the first is the best."""

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, metric: str) -> str:
        if not metric.startswith("eval/"):
            raise ValueError(f"{metric} is no metric of evaluations; name one that begins with eval/")
        return metric

    def cut(self, checkpoints: Checkpoints, best: str = "") -> tuple[Checkpoints, Checkpoints]:
        """Split `checkpoints`, oldest first, into (to delete, to keep). `best` is the path of the best one."""
        if self.keep == "best":
            remaining = tuple(paths for paths in checkpoints if paths[0] == best or paths == checkpoints[-1])
            return tuple(paths for paths in checkpoints if paths not in remaining), remaining
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
