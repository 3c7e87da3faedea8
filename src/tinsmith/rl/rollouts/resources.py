"""What the rollouts of a run share: servers, processes and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.scoring.pool import ScoringPool


class Resource(Protocol):
    """What an environment opens for its rollouts, such as a service or a container."""

    def metrics(self) -> dict[str, float]:
        """Numbers since the previous call, which become metrics of the step."""
        ...

    async def close(self) -> None:
        """Release it. No rollout is in progress."""
        ...


@dataclass(frozen=True, slots=True)
class RolloutResources:
    """The agent endpoint, the scoring processes and the store of a run, and what its environments have opened. The
    first two start when they are first used.

    Example: resources = RolloutResources(); …; await resources.close()
    """

    agent_endpoint: AgentEndpoint = field(default_factory=AgentEndpoint)
    scoring: ScoringPool = field(default_factory=ScoringPool)
    opened: dict[str, Resource] = field(default_factory=dict)
    """What environments have opened, by name."""
    store: dict[str, Any] = field(default_factory=dict)
    """Values that workflows keep from rollout to rollout."""

    def metrics(self) -> dict[str, float]:
        """Numbers of what environments have opened, since the previous call."""
        return {name: value for resource in self.opened.values() for name, value in resource.metrics().items()}

    async def close(self) -> None:
        """Stop the endpoint and the processes, and release what environments have opened. No rollout may be in
        progress."""
        for resource in self.opened.values():
            await resource.close()
        await self.agent_endpoint.close()
        await self.scoring.close()
