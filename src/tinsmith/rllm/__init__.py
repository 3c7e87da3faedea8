"""The Python API under the names of rLLM, so that a file written for it changes its imports and nothing else.

Every name is imported from here: `from tinsmith.rllm import AgentTrainer, Workflow`. Names are imported on first use.
The guide is docs/from/rllm.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinsmith.rllm.agents import BaseAgent, BaseEnv
    from tinsmith.rllm.datasets import Dataset, DatasetRegistry
    from tinsmith.rllm.engines.base import RolloutEngine
    from tinsmith.rllm.engines.openai import OpenAIEngine
    from tinsmith.rllm.engines.tinker import TinkerEngine
    from tinsmith.rllm.estimators import register_rllm_adv_estimator
    from tinsmith.rllm.flows.flow import AgentFlow, Evaluator, evaluator, rollout
    from tinsmith.rllm.flows.records import AgentConfig, EvalOutput, Signal, Task
    from tinsmith.rllm.ready_workflows import (
        CumulativeWorkflow,
        MultiTurnWorkflow,
        SimpleWorkflow,
        SingleTurnWorkflow,
    )
    from tinsmith.rllm.records import (
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
    from tinsmith.rllm.rewards import RewardFunction, RewardOutput, countdown_reward_fn, math_reward_fn, zero_reward
    from tinsmith.rllm.store import InMemoryStore, Store
    from tinsmith.rllm.trainer import AgentTrainer
    from tinsmith.rllm.workflow import Workflow
    from tinsmith.rllm.workflow_engine import AgentWorkflowEngine, mean_metrics, pass_metrics

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
    "math_reward_fn",
    "mean_metrics",
    "pass_metrics",
    "register_rllm_adv_estimator",
    "rollout",
    "zero_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tinsmith.rllm' has no attribute {name!r}")
    return getattr(import_module(f"tinsmith.rllm.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
