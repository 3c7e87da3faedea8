"""AgentTrainer: a configuration of rLLM, a workflow and datasets in Python, as a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.markup import escape
from typing_extensions import override

from tinsmith.dialects.base import check_faults, settings
from tinsmith.errors import ConfigError, UserError
from tinsmith.integrations.rllm.agents import BaseAgent, BaseEnv
from tinsmith.integrations.rllm.datasets import Dataset, DatasetRegistry
from tinsmith.integrations.rllm.estimators import registered_estimators
from tinsmith.integrations.rllm.files import read_config, roles, translate
from tinsmith.integrations.rllm.files import workflow_args as configured_args
from tinsmith.integrations.rllm.files.dialect import finish
from tinsmith.integrations.rllm.ready_workflows import MultiTurnWorkflow
from tinsmith.integrations.rllm.rollouts import ROW, wrapped_row
from tinsmith.integrations.rllm.workflow import Workflow
from tinsmith.overrides import apply_overrides
from tinsmith.rl.config import RunConfig
from tinsmith.rl.run.parts import with_fresh_folder
from tinsmith.runner import TrainResult, train_config
from tinsmith.settings import build
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    from tinsmith.integrations.rllm.store import Store

PLACE = "the configuration"

Rows = Dataset | Sequence[Mapping[str, Any]] | str | None
"""A dataset, a list of rows, or the name of a registered dataset."""


class AgentTrainer:
    """Trains a workflow or an agent flow. `train` starts the run, or resumes the one in its folder.

    Example:

        AgentTrainer(
            config=config,
            workflow_class=SolverJudgeWorkflow,
            workflow_args={"n_solutions": 2, "reward_function": countdown_reward_fn},
            train_dataset=DatasetRegistry.load_dataset("countdown", "train"),
            val_dataset=DatasetRegistry.load_dataset("countdown", "test"),
        ).train()
    """

    def __init__(
        self,
        config: DictConfig | Mapping[str, Any] | None = None,
        workflow_class: type[Workflow] | None = None,
        workflow_args: Mapping[str, Any] | None = None,
        train_dataset: Rows = None,
        val_dataset: Rows = None,
        backend: str = "tinker",
        agent_flow: Any = None,
        evaluator: Any = None,
        traj_group_adv_estimator_map: Mapping[str, Any] | None = None,
        store: Store | None = None,
        agent_class: type[BaseAgent] | None = None,
        env_class: type[BaseEnv] | None = None,
        agent_args: Mapping[str, Any] | None = None,
        env_args: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        **unsupported: Any,
    ) -> None:
        """`config`: of `hydra.main` or `read_config`, or a mapping of rLLM's keys; rLLM's defaults apply to the others.

        Pass workflow_class with its workflow_args, or agent_flow with its evaluator, or agent_class with env_class.
        Without `val_dataset`, nothing is evaluated. `traj_group_adv_estimator_map` maps roles to estimators.
        `overrides` are settings of Tinsmith's own run file, such as "optimizer.weight_decay=0.1". Raises ConfigError
        with every error in the configuration.
        """
        _check_support(backend, unsupported)
        values = config if isinstance(config, DictConfig) else read_config(config or {})
        estimators = registered_estimators(values.get("algorithm") or values.get("rllm", {}).get("algorithm"))
        translation = translate(values, estimators)
        if traj_group_adv_estimator_map:
            translation += roles(values, traj_group_adv_estimator_map, estimators)
        chosen = [name for name, value in _parts(workflow_class, agent_flow, agent_class).items() if value is not None]
        if len(chosen) > 1:
            raise ConfigError(f"AgentTrainer takes one of {' and '.join(chosen)}.", "Leave out the others.")
        if agent_flow is not None:
            path, args = agent_flow, {} if evaluator is None else {"evaluator": evaluator}
        elif agent_class is not None:
            path, args = AgentWorkflow, _agent_args(agent_class, env_class, agent_args, env_args, values)
        else:
            from_config = {**configured_args(values), **dict(values.get("workflow_args") or {})}
            path, args = workflow_class, {**from_config, **dict(workflow_args or {})}
        if store is not None:
            args = {**args, "store": store}
        if path is not None:
            translation += settings({"workflow": {"type": "custom", "path": path, "args": args}, "rollout.split": 1})
        for key, rows in (("tasks.train", train_dataset), ("tasks.eval", val_dataset)):
            if rows is not None:
                translation += settings({key: _source(rows, key.removeprefix("tasks.")), "tasks.held_out": 0})
        checked = check_faults(translation, PLACE)
        self.notes = checked.notes
        """Keys of the configuration that have no effect, or another one than they suggest."""
        self.run_config = build(RunConfig, with_overrides(finish(checked.settings), overrides), PLACE, overrides)
        """The settings of the run."""

    def train(self) -> TrainResult:
        """Run all remaining steps. Raises TinsmithError."""
        console = new_console()
        for note in self.notes:
            console.print(f"[dim]note: {escape(note)}[/]", highlight=False)
        if self.run_config.mode == "bench":
            raise ConfigError(
                "trainer.val_only compares checkpoints, which AgentTrainer does not do.",
                "Use tinsmith run with the configuration as a file, or AgentWorkflowEngine.",
            )
        return train_config(with_fresh_folder(self.run_config), console)


class AgentWorkflow(MultiTurnWorkflow):
    """A conversation of an agent with an environment that is made for each task, if its class has `from_dict`."""

    def __init__(self, rollout_engine: Any, agent_cls: type[BaseAgent], env_cls: type[BaseEnv], **kwargs: Any) -> None:
        self._env_class, self._env_args = env_cls, dict(kwargs.get("env_args") or {})
        self._per_task = env_cls.from_dict is not BaseEnv.from_dict
        if self._per_task:
            kwargs["env_args"], env_cls = {}, _NoEnv
        super().__init__(rollout_engine, agent_cls, env_cls, **kwargs)

    @override
    def reset(self, task: dict[str, Any] | None = None, uid: str | None = None) -> tuple[Any, dict[str, Any]]:
        if self._per_task:
            self.env.close()
            self.env = self._env_class.from_dict({**(task or {}), **self._env_args})
            self.task, self.uid, self._completed_trajectories = task, uid or "", []
            self.agent.reset()
            self.agent.trajectory.task = task
            return self.env.reset()
        return super().reset(task, uid)


class _NoEnv(BaseEnv):
    """Takes the place of an environment before the first task."""

    @override
    def reset(self, task: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        raise NotImplementedError

    @override
    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        raise NotImplementedError


_HINTS = {
    "traj_grouping_hook": "Give the trajectories that are compared the same name, or set algorithm.grouping_level.",
    "hooks": "Write a training loop with tinsmith.open_run.",
    "sandbox_backend": "Start sandboxes in the workflow.",
    "sandbox_concurrency": "Start sandboxes in the workflow.",
    "agent_run_func": "Decorate the function with tinsmith.rllm.rollout, and pass it as agent_flow.",
}


def _check_support(backend: str, unsupported: Mapping[str, Any]) -> None:
    """Raises UserError for another backend, and for arguments that are set and not supported."""
    if backend != "tinker":
        raise UserError(
            f"backend={backend!r} is not supported: training goes through the Tinker API.", 'Set backend="tinker".'
        )
    for name, value in unsupported.items():
        if value is not None or name not in _HINTS:
            raise UserError(f"AgentTrainer: {name} is not supported.", _HINTS.get(name, "Remove it."))


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The settings with overrides; values that are objects of Python are left as they are."""
    objects = {name: values[name] for name in ("workflow", "tasks") if name in values}
    for each in overrides:
        if (name := each.partition("=")[0].partition(".")[0]) in objects:
            raise ConfigError(f"overrides: {name} is set in Python.", "Pass it to AgentTrainer.")
    return {
        **apply_overrides({key: value for key, value in values.items() if key not in objects}, overrides, RunConfig),
        **objects,
    }


def _parts(workflow_class: Any, agent_flow: Any, agent_class: Any) -> dict[str, Any]:
    return {"workflow_class": workflow_class, "agent_flow": agent_flow, "agent_class": agent_class}


def _agent_args(
    agent_class: type[BaseAgent],
    env_class: type[BaseEnv] | None,
    agent_args: Mapping[str, Any] | None,
    env_args: Mapping[str, Any] | None,
    config: DictConfig,
) -> dict[str, Any]:
    """The arguments of AgentWorkflow; those of the configuration apply where the trainer has none."""
    if env_class is None:
        raise UserError("AgentTrainer: agent_class needs env_class.", "Pass the class of the environment too.")
    agent, env = config.get("agent") or {}, config.get("env") or {}
    return {
        "agent_cls": agent_class,
        "env_cls": env_class,
        "agent_args": {**dict(agent.get("agent_args") or {}), **dict(agent_args or {})},
        "env_args": {**dict(env.get("env_args") or {}), **dict(env_args or {})},
        "max_steps": int(agent.get("max_steps") or 1),
    }


def _source(rows: Rows, part: str) -> dict[str, Any]:
    """The source of tasks of a dataset. Raises ConfigError if it is not registered, or empty."""
    split = "train" if part == "train" else "test"
    if isinstance(rows, str):
        name, _, own_split = rows.partition("/")
        dataset = DatasetRegistry.load_dataset(name, own_split or split)
        if dataset is None:
            names = ", ".join(DatasetRegistry.get_dataset_names()) or "none"
            raise ConfigError(f"There is no dataset {name}/{own_split or split}.", f"Registered datasets: {names}.")
        rows = dataset
    if not rows:
        raise ConfigError(f"{part}_dataset has no rows.", "Pass at least one row.")
    label = f"{rows.name}/{rows.split}" if isinstance(rows, Dataset) and rows.name and rows.split else part
    return {
        "type": "rows",
        "name": label,
        "data": [wrapped_row(row) for row in rows],
        "prompt": "{messages}",
        "answer": "",
        "extra": [ROW],
    }
