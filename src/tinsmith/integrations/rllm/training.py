"""Workflows of rLLM in a run: each rollout is one call of `run`, on an engine of the weights in training."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from typing_extensions import override

from tinsmith.errors import ConfigError, UserError
from tinsmith.integrations.rllm.engines.base import RolloutEngine, SnapshotEngine
from tinsmith.integrations.rllm.records import TerminationReason
from tinsmith.integrations.rllm.rollouts import rollout_of, task_row
from tinsmith.integrations.rllm.store import InMemoryStore, Store
from tinsmith.rl.plugins import Arguments, ImportPath, import_object
from tinsmith.rl.types import Rollout, Task
from tinsmith.rl.workflows.base import IndependentRollouts, Workflow, WorkflowContext, WorkflowOptions, WorkflowPolicy

MAX_THREADS = 64
"""Threads for code of workflows that blocks."""
UNUSABLE = (TerminationReason.ERROR, TerminationReason.TIMEOUT)
"""Ends after which a workflow object may still have work in progress, so that it is not used again."""


class RllmWorkflowOptions(WorkflowOptions):
    """A workflow class of rLLM, and its arguments."""

    workflow_class: ImportPath
    """module:Class of a subclass of tinsmith.rllm.Workflow."""
    workflow_args: Arguments
    """Keyword arguments of the class, besides rollout_engine and executor."""

    @property
    @override
    def provides_rewards(self) -> bool:
        return True

    @property
    @override
    def provides_states(self) -> bool:
        return False

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        calls = WorkflowCalls(import_object(self.workflow_class), self.workflow_args, context)
        return IndependentRollouts(calls.rollout, context)


def imported(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with functions and classes imported that a run file names as module:attribute.

    These are arguments whose names end with _function, _fn, _class or _cls. Raises ValueError if that fails.
    """
    return {
        name: import_object(value) if name.endswith(("_function", "_fn", "_class", "_cls")) else value
        for name, value in args.items()
    }


def check_arguments(workflow_class: Any, args: Mapping[str, Any]) -> None:
    """Raises ValueError if the class does not take these arguments, or its `run` is not an async function."""
    name = workflow_class.__qualname__
    if inspect.isabstract(workflow_class) or not inspect.iscoroutinefunction(workflow_class.run):
        raise ValueError(f"{name} has no async def run(self, task, uid)")
    if own := {"rollout_engine", "executor"} & args.keys():
        raise ValueError(f"{name}: the run itself gives {sorted(own)[0]}; leave it out")
    try:
        inspect.signature(workflow_class).bind(rollout_engine=None, executor=None, **args)
    except TypeError as error:
        raise ValueError(f"{name} cannot be created with {sorted(args)}: {error}") from error


class WorkflowCalls:
    """Calls of a workflow. Its objects are used again, one rollout at a time."""

    def __init__(self, workflow_class: Any, args: Mapping[str, Any], context: WorkflowContext) -> None:
        self._class, self._args, self._context = workflow_class, args, context
        self._store: Store = InMemoryStore(context.store)
        self._executor = ThreadPoolExecutor(MAX_THREADS, "workflow")
        self._idle = [self._first()]
        takes_mode = takes_keyword(workflow_class.run, "is_validation")
        self._more = {"is_validation": context.evaluating} if takes_mode else {}

    async def rollout(self, task: Task, policy: WorkflowPolicy, seed: int) -> Rollout:
        """The episode of one call."""
        flow, engine = self._idle.pop() if self._idle else self._create()
        engine.bind(policy.snapshot, seed)
        episode = await flow.run_with_termination_handling(task_row(task), f"{task.id}:{seed}", **self._more)
        if episode.termination_reason not in UNUSABLE:
            self._idle.append((flow, engine))
        return rollout_of(episode)

    def _first(self) -> tuple[Any, SnapshotEngine]:
        """The first workflow object. Raises ConfigError if it cannot be created, before the first rollout."""
        try:
            return self._create()
        except Exception as error:
            raise ConfigError(
                f"{self._class.__name__} cannot be created: {type(error).__name__}: {error}", "Correct workflow_args."
            ) from error

    def _create(self) -> tuple[Any, SnapshotEngine]:
        engine = SnapshotEngine(self._context.sampling, accumulate_reasoning=True)
        engine.is_validation = self._context.evaluating
        return create_workflow(self._class, self._args, engine, self._executor, self._store), engine


def create_workflow(
    workflow_class: Any,
    args: Mapping[str, Any],
    engine: RolloutEngine,
    executor: ThreadPoolExecutor,
    store: Store,
) -> Any:
    """A workflow object. Its store is the shared one, unless its arguments set another.

    Raises UserError if several of these workflows cannot run at the same time.
    """
    workflow = workflow_class(rollout_engine=engine, executor=executor, **args)
    if not workflow.is_multithread_safe():
        raise UserError(
            f"{workflow_class.__name__} has an environment that cannot run several times in a process.",
            "Make the environment safe for threads, and let its is_multithread_safe return True.",
        )
    if workflow.store is None:
        workflow.store = store
    return workflow


def takes_keyword(function: Any, name: str) -> bool:
    """Whether a function can be called with the keyword `name`."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
