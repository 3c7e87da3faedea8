"""ShadowEnvironment, the base class of environments whose rollouts take shadow steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.integrations.minds.shadow.config import ShadowConfig
from tinsmith.integrations.minds.shadow.service import ShadowService
from tinsmith.rl.environments.base import EnvironmentOptions, OpeningRun
from tinsmith.rl.workflows.base import WorkflowContext
from tinsmith.settings import Settings

SHADOW = "shadow"
"""Name of the section of the run file, and of the service among the resources of the run."""


class ShadowEnvironment(EnvironmentOptions):
    """Base class of environments that take shadow steps: a run has one ShadowService, which `shadow_of` returns."""

    sections: ClassVar[Mapping[str, type[Settings]]] = {SHADOW: ShadowConfig}
    needs_policy: ClassVar[bool] = True

    @override
    async def open(self, run: OpeningRun) -> None:
        from tinsmith.integrations.minds.shadow.tinker import open_shadow  # imports the SDK, and so PyTorch

        if SHADOW not in run.resources:
            config = cast(ShadowConfig, run.sections[SHADOW])
            run.resources[SHADOW] = open_shadow(config, run.policy, config.versions(run.staleness))


def shadow_of(context: WorkflowContext) -> ShadowService:
    """The service of a run. Raises ConfigError where no environment has opened one."""
    shadow = context.resources.get(SHADOW)
    if not isinstance(shadow, ShadowService):
        raise ConfigError(
            "There is no policy in training here, so no shadow steps.", "Use the environment in a run of mode both."
        )
    return shadow
