"""AgentWorkflowEngine: runs a workflow for many tasks at once, without training, and measures the results."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tinsmith.errors import TinsmithError, UserError
from tinsmith.integrations.rllm.engines.base import EVALUATING, RolloutEngine
from tinsmith.integrations.rllm.records import Episode, TerminationReason
from tinsmith.integrations.rllm.rollouts import error_of
from tinsmith.integrations.rllm.store import InMemoryStore, Store
from tinsmith.integrations.rllm.training import MAX_THREADS, create_workflow
from tinsmith.integrations.rllm.workflow import Workflow
from tinsmith.plurals import counted
from tinsmith.rl.record.metrics import pass_at_k


class AgentWorkflowEngine:
    """Runs tasks through a pool of workflow objects, each of which serves one rollout at a time."""

    def __init__(
        self,
        workflow_cls: type[Workflow],
        workflow_args: Mapping[str, Any] | None,
        rollout_engine: RolloutEngine,
        config: Any = None,
        n_parallel_tasks: int = 128,
        retry_limit: int = 3,
        raise_on_error: bool = True,
        store: Store | None = None,
    ) -> None:
        """`retry_limit`: attempts of a rollout that ends with an error. With `raise_on_error`, an error of the last one
        is raised; otherwise the episode has it in `info["error"]`.

        `config` may hold `workflow.n_parallel_tasks` and `workflow.retry_limit`, which replace the arguments.
        """
        if not (isinstance(workflow_cls, type) and issubclass(workflow_cls, Workflow)):
            raise UserError(
                f"{workflow_cls!r} is not a subclass of tinsmith.rllm.Workflow.", "Derive it from Workflow."
            )
        limits = dict((config or {}).get("workflow") or {})
        self.n_parallel_tasks = int(limits.get("n_parallel_tasks") or n_parallel_tasks)
        self.retry_limit = max(1, int(limits.get("retry_limit") or retry_limit))
        self.raise_on_error, self.rollout_engine = raise_on_error, rollout_engine
        self.store = InMemoryStore() if store is None else store
        self._class, self._args = workflow_cls, dict(workflow_args or {})
        self._executor = ThreadPoolExecutor(min(self.n_parallel_tasks, MAX_THREADS), "workflow")
        self._idle: list[Workflow] = []

    async def execute_tasks(
        self, tasks: Sequence[Mapping[str, Any]], task_ids: Sequence[str] | None = None, **kwargs: Any
    ) -> list[Episode]:
        """One episode for each entry of `tasks`: by task in the order of its first entry, then by rollout.

        Entries with the same id are rollouts of one task. `kwargs` are passed to the workflow's `run`;
        `is_validation=True` selects the sampling parameters of the evaluation. Raises TinsmithError.
        """
        ids = [str(uuid.uuid4()) for _ in tasks] if task_ids is None else [str(task_id) for task_id in task_ids]
        if len(ids) != len(tasks):
            raise UserError(
                f"There are {counted(len(tasks), 'task')} and {len(ids)} task_ids.", "Pass an id for each task."
            )
        numbers: Counter[str] = Counter()
        rollouts: dict[str, list[asyncio.Task[Episode]]] = defaultdict(list)
        gate = asyncio.Semaphore(self.n_parallel_tasks)
        evaluating = EVALUATING.set(bool(kwargs.pop("is_validation", self.rollout_engine.is_validation)))
        try:
            async with asyncio.TaskGroup() as group:
                for task, task_id in zip(tasks, ids, strict=True):
                    rollout = self._rollout(gate, dict(task), f"{task_id}:{numbers[task_id]}", kwargs)
                    rollouts[task_id].append(group.create_task(rollout))
                    numbers[task_id] += 1
        except ExceptionGroup as failures:
            messages = list(dict.fromkeys(map(str, failures.exceptions)))
            if len(messages) == 1:
                raise failures.exceptions[0] from None
            raise TinsmithError("\n".join(messages)) from failures
        finally:
            EVALUATING.reset(evaluating)
        return [rollout.result() for of_task in rollouts.values() for rollout in of_task]

    async def _rollout(
        self, gate: asyncio.Semaphore, task: dict[str, Any], uid: str, more: Mapping[str, Any]
    ) -> Episode:
        async with gate:
            episode = await self._attempt(task, uid, more)
            for _ in range(self.retry_limit - 1):
                if episode.termination_reason != TerminationReason.ERROR:
                    break
                episode = await self._attempt(task, uid, more)
        if self.raise_on_error and episode.termination_reason == TerminationReason.ERROR:
            raise TinsmithError(f"Rollout {uid} failed {counted(self.retry_limit, 'time')}: {error_of(episode)}")
        return episode

    async def _attempt(self, task: dict[str, Any], uid: str, more: Mapping[str, Any]) -> Episode:
        workflow = self._idle.pop() if self._idle else self._workflow()
        episode = await workflow.run_with_termination_handling(task, uid, **more)
        if episode.termination_reason not in (TerminationReason.ERROR, TerminationReason.TIMEOUT):
            self._idle.append(workflow)  # one that failed may still have work in progress
        return episode

    def _workflow(self) -> Workflow:
        return create_workflow(self._class, self._args, self.rollout_engine, self._executor, self.store)


def pass_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """pass@1 and pass@k of the episodes, by task.

    `pass@1` is the fraction of correct rollouts. `pass@k` is the fraction of tasks with a correct one among their k
    rollouts, k the largest number of rollouts of a task, as rLLM counts. `unbiased_pass@j` for j = 1, 2, 4, … estimates
    the probability that at least one of j rollouts is correct, up to the smallest number of rollouts of a task.
    """
    by_task: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        by_task[episode.task_id].append(bool(episode.is_correct))
    if not by_task:
        return {}
    results = list(by_task.values())
    largest, smallest = max(map(len, results)), min(map(len, results))
    metrics = {"pass@1": sum(map(sum, results)) / len(episodes)}
    metrics[f"pass@{largest}"] = sum(map(any, results)) / len(results) if largest > 1 else metrics["pass@1"]
    sizes = [2**power for power in range(smallest.bit_length()) if 2**power <= smallest]
    for size in sizes:
        estimates = [pass_at_k(len(right), sum(right), size) for right in results]
        metrics[f"unbiased_pass@{size}"] = sum(estimates) / len(estimates)
    return metrics


def mean_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """The mean of each metric of the workflow over the episodes that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.metrics.items():
            values[name].append(float(value))
    return {name: sum(each) / len(each) for name, each in values.items()}
