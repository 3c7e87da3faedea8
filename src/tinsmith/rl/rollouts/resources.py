"""What the rollouts of a run share: servers, processes and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.scoring.pool import ScoringPool
from tinsmith.rl.shadow.service import ShadowService


@dataclass(frozen=True, slots=True)
class RolloutResources:
    """The agent endpoint, the scoring processes and the store of a run. The first two start when they are first used.

    Example: resources = RolloutResources(); …; await resources.close()
    """

    agent_endpoint: AgentEndpoint = field(default_factory=AgentEndpoint)
    scoring: ScoringPool = field(default_factory=ScoringPool)
    shadow: ShadowService | None = None
    """Shadow steps, if a workflow needs them."""
    store: dict[str, Any] = field(default_factory=dict)
    """Values that workflows keep from rollout to rollout."""

    async def close(self) -> None:
        """Stop the endpoint and the processes. No rollout may be in progress."""
        if self.shadow is not None:
            await self.shadow.close()
        await self.agent_endpoint.close()
        await self.scoring.close()
