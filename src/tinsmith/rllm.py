"""The Python API under the names of rLLM, so that a file written for it changes its imports and nothing else.

Every name is imported from here: `from tinsmith.rllm import AgentTrainer, Workflow`. Names are imported on first use;
their code is in `tinsmith.integrations.rllm`. The guide is docs/from/rllm.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinsmith.integrations.rllm import hydra
    from tinsmith.integrations.rllm.agents import BaseAgent, BaseEnv
    from tinsmith.integrations.rllm.datasets import Dataset, DatasetRegistry
    from tinsmith.integrations.rllm.engines.base import RolloutEngine
    from tinsmith.integrations.rllm.engines.openai import OpenAIEngine
    from tinsmith.integrations.rllm.engines.tinker import TinkerEngine
    from tinsmith.integrations.rllm.estimators import register_rllm_adv_estimator
    from tinsmith.integrations.rllm.flows.flow import AgentFlow, Evaluator, evaluator, rollout
    from tinsmith.integrations.rllm.flows.records import AgentConfig, EvalOutput, Signal, Task
    from tinsmith.integrations.rllm.ready_workflows import (
        CumulativeWorkflow,
        MultiTurnWorkflow,
        SimpleWorkflow,
        SingleTurnWorkflow,
    )
    from tinsmith.integrations.rllm.records import (
        Action,
        Episode,
        ModelOutput,
        Step,
        TerminationEvent,
        TerminationReason,
        ToolCall,
        Trajectory,
        TrajectoryGroup,
    )
    from tinsmith.integrations.rllm.rewards import (
        RewardFunction,
        RewardOutput,
        countdown_reward_fn,
        math_reward_fn,
        zero_reward,
    )
    from tinsmith.integrations.rllm.store import InMemoryStore, Store
    from tinsmith.integrations.rllm.trainer import AgentTrainer
    from tinsmith.integrations.rllm.workflow import Workflow
    from tinsmith.integrations.rllm.workflow_engine import AgentWorkflowEngine, mean_metrics, pass_metrics

_PACKAGE = "tinsmith.integrations.rllm"
_MODULES = {
    "Action": "records",
    "AgentConfig": "flows.records",
    "AgentFlow": "flows.flow",
    "AgentTrainer": "trainer",
    "AgentWorkflowEngine": "workflow_engine",
    "BaseAgent": "agents",
    "BaseEnv": "agents",
    "CumulativeWorkflow": "ready_workflows",
    "Dataset": "datasets",
    "DatasetRegistry": "datasets",
    "Episode": "records",
    "EvalOutput": "flows.records",
    "Evaluator": "flows.flow",
    "InMemoryStore": "store",
    "ModelOutput": "records",
    "MultiTurnWorkflow": "ready_workflows",
    "OpenAIEngine": "engines.openai",
    "RewardFunction": "rewards",
    "RewardOutput": "rewards",
    "RolloutEngine": "engines.base",
    "Signal": "flows.records",
    "SimpleWorkflow": "ready_workflows",
    "SingleTurnWorkflow": "ready_workflows",
    "Step": "records",
    "Store": "store",
    "Task": "flows.records",
    "TerminationEvent": "records",
    "TerminationReason": "records",
    "TinkerEngine": "engines.tinker",
    "ToolCall": "records",
    "Trajectory": "records",
    "TrajectoryGroup": "records",
    "Workflow": "workflow",
    "countdown_reward_fn": "rewards",
    "evaluator": "flows.flow",
    "math_reward_fn": "rewards",
    "mean_metrics": "workflow_engine",
    "pass_metrics": "workflow_engine",
    "register_rllm_adv_estimator": "estimators",
    "rollout": "flows.flow",
    "zero_reward": "rewards",
}

__all__ = [
    "Action",
    "AgentConfig",
    "AgentFlow",
    "AgentTrainer",
    "AgentWorkflowEngine",
    "BaseAgent",
    "BaseEnv",
    "CumulativeWorkflow",
    "Dataset",
    "DatasetRegistry",
    "Episode",
    "EvalOutput",
    "Evaluator",
    "InMemoryStore",
    "ModelOutput",
    "MultiTurnWorkflow",
    "OpenAIEngine",
    "RewardFunction",
    "RewardOutput",
    "RolloutEngine",
    "Signal",
    "SimpleWorkflow",
    "SingleTurnWorkflow",
    "Step",
    "Store",
    "Task",
    "TerminationEvent",
    "TerminationReason",
    "TinkerEngine",
    "ToolCall",
    "Trajectory",
    "TrajectoryGroup",
    "Workflow",
    "countdown_reward_fn",
    "evaluator",
    "hydra",
    "math_reward_fn",
    "mean_metrics",
    "pass_metrics",
    "register_rllm_adv_estimator",
    "rollout",
    "zero_reward",
]


def __getattr__(name: str) -> Any:
    if name == "hydra":
        return import_module(f"{_PACKAGE}.hydra")
    if name not in _MODULES:
        raise AttributeError(f"module 'tinsmith.rllm' has no attribute {name!r}")
    return getattr(import_module(f"{_PACKAGE}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
