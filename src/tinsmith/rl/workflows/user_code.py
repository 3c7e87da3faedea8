"""UserWorkflow, the base class of workflows that are code of the user, selected by its import path."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from typing_extensions import override

from tinsmith.rl.plugins import CustomPart, Kind
from tinsmith.rl.workflows.base import IndependentRollouts, Workflow, WorkflowContext, WorkflowOptions


class UserWorkflow(CustomPart, WorkflowOptions):
    """Settings of a workflow that calls code of the user."""

    kind: ClassVar[Kind] = "workflow"
    timeout: float | None = Field(default=None, gt=0)
    """Time limit of one rollout, in seconds: what was sampled until then is kept. Not set: rollout.timeout, after which
    the rollout has failed."""

    @property
    @override
    def provides_rewards(self) -> bool:
        return True

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return IndependentRollouts(self.rollout, context, self.timeout)
