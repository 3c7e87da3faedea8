"""Tinsmith: RL post-training of language models on the Tinker API, whole.

Everything in `__all__`, and `__version__`, is the public API: what plugins, notebooks and scripts import
(docs/reference/api.md). Names are imported on first use, so `import tinsmith` is fast and needs neither torch nor the
SDK.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from tinsmith.rl.algorithms.advantages.base import Trace
    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.environments.base import EnvironmentOptions
    from tinsmith.rl.plugins import (
        advantage,
        algorithm,
        callback,
        environment,
        evaluation,
        group_filter,
        loss,
        monitor,
        order,
        reward,
        sampling_method,
        source,
        workflow,
    )
    from tinsmith.rl.record.monitors.jsonl import read_metrics
    from tinsmith.rl.rewards import make_reward
    from tinsmith.rl.rewards.base import Reward, Score
    from tinsmith.rl.run.run import Run
    from tinsmith.rl.types import Group, Image, Message, Rollout, Task, Trajectory, Turn
    from tinsmith.rl.workflows.base import WorkflowOptions, WorkflowPolicy
    from tinsmith.rl.workflows.conversation import Conversation, Terminated
    from tinsmith.rl.workflows.multi_turn import Answer, Environment
    from tinsmith.runner import TrainResult, open_run, train
    from tinsmith.service.config import ServeConfig
    from tinsmith.service.embedded import embedded

__all__ = [
    "Answer",
    "Conversation",
    "Environment",
    "EnvironmentOptions",
    "Group",
    "Image",
    "Message",
    "Reward",
    "Rollout",
    "Run",
    "RunConfig",
    "Score",
    "ServeConfig",
    "Task",
    "Terminated",
    "Trace",
    "TrainResult",
    "Trajectory",
    "Turn",
    "WorkflowOptions",
    "WorkflowPolicy",
    "advantage",
    "algorithm",
    "callback",
    "embedded",
    "environment",
    "evaluation",
    "group_filter",
    "loss",
    "make_reward",
    "monitor",
    "open_run",
    "order",
    "read_metrics",
    "reward",
    "sampling_method",
    "source",
    "train",
    "workflow",
]

_MODULES = {
    "Answer": "tinsmith.rl.workflows.multi_turn",
    "Conversation": "tinsmith.rl.workflows.conversation",
    "Environment": "tinsmith.rl.workflows.multi_turn",
    "EnvironmentOptions": "tinsmith.rl.environments.base",
    "Group": "tinsmith.rl.types",
    "Image": "tinsmith.rl.types",
    "Message": "tinsmith.rl.types",
    "Reward": "tinsmith.rl.rewards.base",
    "Rollout": "tinsmith.rl.types",
    "Run": "tinsmith.rl.run.run",
    "RunConfig": "tinsmith.rl.config",
    "Score": "tinsmith.rl.rewards.base",
    "ServeConfig": "tinsmith.service.config",
    "Task": "tinsmith.rl.types",
    "Terminated": "tinsmith.rl.workflows.conversation",
    "Trace": "tinsmith.rl.algorithms.advantages.base",
    "TrainResult": "tinsmith.runner",
    "Trajectory": "tinsmith.rl.types",
    "Turn": "tinsmith.rl.types",
    "WorkflowOptions": "tinsmith.rl.workflows.base",
    "WorkflowPolicy": "tinsmith.rl.workflows.base",
    "advantage": "tinsmith.rl.plugins",
    "algorithm": "tinsmith.rl.plugins",
    "callback": "tinsmith.rl.plugins",
    "embedded": "tinsmith.service.embedded",
    "environment": "tinsmith.rl.plugins",
    "evaluation": "tinsmith.rl.plugins",
    "group_filter": "tinsmith.rl.plugins",
    "loss": "tinsmith.rl.plugins",
    "make_reward": "tinsmith.rl.rewards",
    "monitor": "tinsmith.rl.plugins",
    "open_run": "tinsmith.runner",
    "order": "tinsmith.rl.plugins",
    "read_metrics": "tinsmith.rl.record.monitors.jsonl",
    "reward": "tinsmith.rl.plugins",
    "sampling_method": "tinsmith.rl.plugins",
    "source": "tinsmith.rl.plugins",
    "train": "tinsmith.runner",
    "workflow": "tinsmith.rl.plugins",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("tinsmith")
    if name not in _MODULES:
        raise AttributeError(f"module 'tinsmith' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
