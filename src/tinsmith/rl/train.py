"""The training loop, and how a run is assembled from its configuration.

`loop` is the only built-in loop: get a batch, compute the update, apply it, log, save. Synchronous training is
staleness 0. `assemble` creates the parts of a run; the server is reached through a `Connect` function.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import numpy as np
from rich.console import Console

from tinsmith.errors import ConfigError
from tinsmith.rl import algorithms, logs, monitors
from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.critic import Critic
from tinsmith.rl.config import RunConfig
from tinsmith.rl.data.demonstrations import Demonstrations
from tinsmith.rl.data.run_data import RunData
from tinsmith.rl.data.tasks import TaskSampler
from tinsmith.rl.evaluate import EvalConfig, Evaluator, is_partial
from tinsmith.rl.monitors.base import RunInfo
from tinsmith.rl.policy.base import Policy, Snapshot
from tinsmith.rl.policy.request_limit import RequestLimit, TokenRates
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rollouts import buffers
from tinsmith.rl.rollouts.batch_source import (
    BatchSource,
    BatchSourceState,
    BufferedBatchSource,
    EmptyBatchSource,
)
from tinsmith.rl.rollouts.buffers.memory import MemoryBuffer
from tinsmith.rl.rollouts.buffers.replay import BatchSelector
from tinsmith.rl.rollouts.coordination import CoordinationNotes
from tinsmith.rl.rollouts.producer import SamplingPlan
from tinsmith.rl.rollouts.resources import RolloutResources
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.rollouts.sampling_loop import SamplingLoop
from tinsmith.rl.rollouts.weight_sync import WeightPublisher
from tinsmith.rl.run import Connect, Run, StepTimer, connect_policy, folder_path
from tinsmith.rl.run_folder import RandomStates, RunFolder, State
from tinsmith.rl.workflows.base import Workflow, WorkflowContext

log = logging.getLogger(__name__)


async def train(config: RunConfig, connect: Connect, console: Console) -> State:
    """Start a run, or resume the one in its folder, and return its final state. A finished run is left as it is."""
    config, data = _prepared(config)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_opened(config))
        if folder.state is not None and folder.state.step >= config.steps and not folder.goes_back:
            return folder.state
        run = await stack.enter_async_context(_started(config, folder, connect, console, data))
        state = await loop(run)
        log.info("Finished: %d steps; final weights: %s", state.step, state.path)
        return state


async def loop(run: Run) -> State:
    """Take all remaining steps; returns the state saved by the last one."""
    await run.evaluate_before_training()
    for step in run.steps():
        timer = StepTimer()
        batch = await run.batches.next(step)
        timer.lap("rollouts")
        groups = run.filtered_groups(batch.groups)
        update = await run.algorithm.score(step, groups, run.next_demonstrations())
        version = run.policy.version
        numbers = await run.update(step, update)
        timer.lap("update")
        await run.batches.mark_trained(step)
        run.log(step, batch, len(groups), version, numbers, timer)
        await run.save_and_evaluate(step)
    assert run.folder.state is not None  # the last step saves
    return run.folder.state


@asynccontextmanager
async def open_run(config: RunConfig, connect: Connect, console: Console) -> AsyncIterator[Run]:
    """A run that is ready for its next step, for a custom training loop; `loop` is the built-in loop."""
    config, data = _prepared(config)
    with _opened(config) as folder:
        async with _started(config, folder, connect, console, data) as run:
            yield run


def _prepared(config: RunConfig) -> tuple[RunConfig, RunData]:
    data = RunData(config.tasks, config.demonstrations, config.seed)
    return resolve_steps(config, data), data


@contextmanager
def _opened(config: RunConfig) -> Iterator[RunFolder]:
    settings = config.model_dump(mode="json")
    folder = RunFolder.open(folder_path(config), settings, resume=config.resume is True, resume_from=config.resume_from)
    try:
        yield folder
    finally:
        folder.close()


@asynccontextmanager
async def _started(
    config: RunConfig, folder: RunFolder, connect: Connect, console: Console, data: RunData
) -> AsyncIterator[Run]:
    with logs.log_to_folder(folder.path, config.log_level):
        monitors.announce(config.monitors, folder.path, console)
        async with assemble(config, folder, connect, console, data) as run:
            log.info("%s: starting at step %d of %d, in %s", config.name, run.steps().start, config.steps, folder.path)
            yield run


@asynccontextmanager
async def assemble(
    config: RunConfig, folder: RunFolder, connect: Connect, console: Console, data: RunData
) -> AsyncIterator[Run]:
    """Create the parts of a run, and close them in order. Raises ConfigError before the first request to a server."""
    task_sampler, held_out = data.tasks
    runner = RolloutRunner(config.rollout, RequestLimit(config.concurrency))
    resources = RolloutResources()
    judge = Rewards(config.eval.rewards or config.rewards, pool=resources.scoring) if config.evaluates else None
    policy = await connect_policy(config, folder, connect, console)
    state = folder.state
    resources.store.update(state.store if state else {})
    batches = (
        _batch_source(config, folder, policy, task_sampler, runner, workflow_context(config, resources))
        if config.uses_rollouts
        else EmptyBatchSource()
    )
    eval_workflow = eval_workflow_maker(config, resources)
    demonstrations = _demonstrations(config, data, policy, state)
    critic = await _critic(config, policy, state)
    reference = await _reference(config, policy, state)
    columns = _columns(config, policy, reference, critic, runner.requests)
    algorithm = algorithms.Algorithm(config.algorithm, policy.extensions, columns, config.seed, config.group_size)
    console.print(f"[dim]{config.algorithm.type}: the loss is {algorithm.loss_location}[/]", highlight=False)
    if config.plugins:
        console.print(f"[dim]with plugins of {config.plugins}[/]", highlight=False)
    _restore(state, task_sampler, algorithm, config.seed)
    await batches.restore(state.batches if state else BatchSourceState())
    try:
        run_monitors = monitors.build(config.monitors, _run_info(config, folder, policy), console)
    except BaseException:
        await policy.close()
        raise
    try:
        yield Run(
            config=config,
            folder=folder,
            policy=policy,
            task_sampler=task_sampler,
            batches=batches,
            algorithm=algorithm,
            evaluator=Evaluator(config.eval, held_out if judge else {}, eval_workflow, config.seed, runner),
            rewards=judge,
            monitors=run_monitors,
            reference=reference,
            critic=critic,
            demonstrations=demonstrations,
            store=resources.store,
            rates=TokenRates(runner.requests),
        )
    finally:
        await batches.close()
        await resources.close()
        run_monitors.close()
        await policy.close()


def _run_info(config: RunConfig, folder: RunFolder, policy: Policy) -> RunInfo:
    return RunInfo(
        name=config.name,
        folder=folder.path,
        steps=config.steps,
        start=folder.state.step if folder.state else 0,
        settings=config.model_dump(mode="json"),
        decode=policy.chat.decode,
    )


def _demonstrations(config: RunConfig, data: RunData, policy: Policy, state: State | None) -> Demonstrations | None:
    if config.demonstrations is None:
        return None
    pairs = config.algorithm.learns_from == "pairs"
    _, held_out = data.tasks
    demonstrations = Demonstrations(
        config.demonstrations, data.demonstrations, held_out, policy.chat, config.seed, pairs=pairs
    )
    if state is not None:
        demonstrations.cursor = state.demonstrations_drawn
    return demonstrations


def eval_workflow_maker(config: RunConfig, resources: RolloutResources) -> Callable[[EvalConfig], Workflow]:
    """A function from the evaluation settings of a source to its workflow."""

    def make(settings: EvalConfig) -> Workflow:
        parts = WorkflowContext(
            sampling=settings.sampling(config.sampling),
            rewards=Rewards(settings.rewards or config.rewards, pool=resources.scoring),
            agent_endpoint=resources.agent_endpoint,
            store=resources.store,
            evaluating=True,
        )
        return (settings.workflow or config.workflow).make(parts)

    return make


def workflow_context(config: RunConfig, resources: RolloutResources) -> WorkflowContext:
    """Context of the workflow that samples training rollouts."""
    return WorkflowContext(
        sampling=config.sampling,
        rewards=Rewards(config.rewards, needed=config.algorithm.advantage.reads_rewards, pool=resources.scoring),
        agent_endpoint=resources.agent_endpoint,
        store=resources.store,
    )


def sampling_plan(config: RunConfig) -> SamplingPlan:
    """The sampling plan. With sync.style fixed, step t uses batch t; else sampling runs as long as training."""
    waiting = config.buffer
    one_each = config.sync.style == "fixed" and not waiting.replay.enable and waiting.max_staleness is None
    return SamplingPlan(
        steps=config.steps if one_each else None,
        groups=config.groups_per_step,
        size=config.group_size,
        staleness=config.staleness,
        seed=config.seed,
        sync=config.sync,
        filters=config.filters,
        recomputes=config.algorithm.recomputes,
        filter_refills=config.filter_refills,
        min_partial=config.min_partial_groups,
        is_partial=lambda group: is_partial(group, config.eval.threshold),
    )


def _batch_source(
    config: RunConfig,
    folder: RunFolder,
    policy: Policy,
    task_sampler: TaskSampler,
    runner: RolloutRunner,
    context: WorkflowContext,
) -> BatchSource:
    plan = sampling_plan(config)
    buffer = buffers.build(config.buffer, folder.path, config.name)
    in_process = config.mode != "train"
    notes = CoordinationNotes(MemoryBuffer() if in_process else buffer)
    method = config.sync.method or ("memory" if in_process else "checkpoint")
    keep = config.sync.checkpoints_to_keep(config.staleness)
    publisher = WeightPublisher(policy, notes, method, keep, config.checkpoint.ttl_seconds)
    sampling = None
    if in_process:
        sampling = SamplingLoop(
            config.workflow.make(context),
            task_sampler,
            publisher.open,
            plan,
            runner,
            buffer,
            notes,
            capacity=config.buffer.capacity,
            timeout_hint="Set sync.timeout higher than a step takes.",
        )
    selector = BatchSelector(buffer, config.buffer, config.seed)
    return BufferedBatchSource(
        buffer, selector, policy, publisher, notes, config.sync, last_step=config.steps, sampling=sampling
    )


async def _critic(config: RunConfig, policy: Policy, state: State | None) -> Critic | None:
    if (settings := config.algorithm.critic) is None:
        return None
    learner = await policy.auxiliary_adapter(settings.rank, config.seed, state.critic_path if state else "")
    return Critic(settings, learner, config.steps)


async def _reference(config: RunConfig, policy: Policy, state: State | None) -> str:
    if config.algorithm.reference == "base":
        return config.model.name
    return state.reference if state else await policy.save_for_sampling("start")


def _columns(
    config: RunConfig, policy: Policy, reference: str, critic: Critic | None, requests: RequestLimit
) -> dict[str, algorithms.ColumnSource]:
    """Sources of the per-token columns that an algorithm may request."""

    def logprobs_by(name: str) -> algorithms.ColumnSource:
        async def logprobs(rows: Sequence[TrainingRow]) -> list[np.ndarray]:
            return await target_logprobs(requests.around(await policy.open_model(name)), rows)

        return logprobs

    sources: dict[str, algorithms.ColumnSource] = {"reference": logprobs_by(reference), "entropy": policy.entropies}
    if critic is not None:
        sources["values"] = critic.values
    if config.algorithm.teacher:
        sources["teacher"] = logprobs_by(config.algorithm.teacher)
    return sources


async def target_logprobs(snapshot: Snapshot, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
    """Logprobs of the targets of each row, float32 [N]."""
    return list(await asyncio.gather(*(snapshot.logprobs(row.sequence) for row in rows)))


def _restore(state: State | None, task_sampler: TaskSampler, algorithm: Algorithm, seed: int) -> None:
    if state is None:
        RandomStates.seeded(seed).restore()
        return
    state.random.restore()
    task_sampler.restore(state.cursor, state.order)
    algorithm.restore(state.algorithm)


def resolve_steps(config: RunConfig, data: RunData) -> RunConfig:
    """The configuration with `epochs` as steps: floor(rows x epochs / rows per step), at most `steps` if that is set.

    Rows that do not fill a last step are not trained on. Without `epochs`, or without tasks (mode train and mode bench
    may have none), the configuration is returned as it is.
    """
    if config.epochs is None or (config.uses_rollouts and not config.tasks.sources):
        return config
    rows, per_step, key = _count_rows(config, data), config.groups_per_step, "groups_per_step"
    if config.demonstrations is not None and not config.uses_rollouts:
        per_step, key = config.demonstrations.count(per_step, config.group_size, alone=True), "demonstrations.per_step"
    steps = int(rows * config.epochs // per_step)
    if not steps:
        raise ConfigError(
            f"{config.epochs:g} epochs of {rows} are less than one step of {per_step}.", f"Set {key} lower."
        )
    return config.model_copy(update={"steps": min(steps, config.steps or steps)})


def _count_rows(config: RunConfig, data: RunData) -> int:
    if config.demonstrations is None or config.uses_rollouts:
        return data.tasks[0].size
    return sum(map(len, data.demonstrations))
