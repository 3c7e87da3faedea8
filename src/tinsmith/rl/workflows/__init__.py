"""Workflows: how a task becomes rollouts. Each is a settings class; a run file selects one by its `type`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tinsmith.rl.workflows.agent import AgentConfig
from tinsmith.rl.workflows.custom import CustomConfig
from tinsmith.rl.workflows.multi_turn import MultiTurnConfig
from tinsmith.rl.workflows.single_turn import MathConfig, SingleTurnConfig
from tinsmith.rl.workflows.tool_use import ToolsConfig

WorkflowConfig = Annotated[
    SingleTurnConfig | MathConfig | MultiTurnConfig | ToolsConfig | AgentConfig | CustomConfig,
    Field(discriminator="type"),
]
"""`config.make(context)` creates the workflow."""
