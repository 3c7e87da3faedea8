"""The table of workflows."""

from __future__ import annotations

from tinsmith.rl.policy import SamplingConfig
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.workflows.base import Workflow
from tinsmith.rl.workflows.single_turn import SingleTurn, SingleTurnConfig

WorkflowConfig = SingleTurnConfig


def build(config: WorkflowConfig, sampling: SamplingConfig, rewards: Rewards) -> Workflow:
    """The workflow that the configuration names."""
    return SingleTurn(config, sampling, rewards)
