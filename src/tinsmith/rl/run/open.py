"""How a run is assembled from its configuration, and how its parts are closed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from rich.console import Console

from tinsmith.rl.algorithms.algorithm import Algorithm, ColumnSource
from tinsmith.rl.algorithms.critic import Critic
from tinsmith.rl.config import RunConfig
from tinsmith.rl.data.demonstrations import Demonstrations
from tinsmith.rl.data.tasks import TaskSampler
from tinsmith.rl.ending.stop import StopSignal
from tinsmith.rl.ending.until import EndCondition
from tinsmith.rl.evaluate import Evaluator
from tinsmith.rl.policy.base import Policy
from tinsmith.rl.policy.request_limit import RequestLimit, TokenRates
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.record import monitors
from tinsmith.rl.record.monitors.base import RunInfo
from tinsmith.rl.record.timeline import OverlapMeter, Timeline
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rollouts import buffers
from tinsmith.rl.rollouts.backoff import Backoff
from tinsmith.rl.rollouts.batch_source import (
    BatchSource,
    BatchSourceState,
    BufferedBatchSource,
    EmptyBatchSource,
)
from tinsmith.rl.rollouts.buffers.memory import MemoryBuffer
from tinsmith.rl.rollouts.buffers.replay import BatchSelector
from tinsmith.rl.rollouts.coordination import CoordinationNotes
from tinsmith.rl.rollouts.filters import GroupFilters
from tinsmith.rl.rollouts.resources import RolloutResources
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.rollouts.sampling_loop import SamplingLoop
from tinsmith.rl.rollouts.task_draws import LocalDraws
from tinsmith.rl.rollouts.weight_sync import WeightPublisher
from tinsmith.rl.run.agreement import agree
from tinsmith.rl.run.deferred import DeferredStates
from tinsmith.rl.run.folder import RunFolder
from tinsmith.rl.run.parts import (
    RunData,
    connect_policy,
    eval_workflow_maker,
    sampling_plan,
    taking_images_of,
    training_workflow,
)
from tinsmith.rl.run.run import Connect, Run
from tinsmith.rl.run.state import RandomStates, State
from tinsmith.rl.shadow.tinker import open_shadow


@asynccontextmanager
async def assemble(
    config: RunConfig, folder: RunFolder, connect: Connect, console: Console, data: RunData, stop: StopSignal
) -> AsyncIterator[Run]:
    """Create the parts of a run, and close them in order. Raises ConfigError before the first request to a server."""
    task_sampler, held_out = data.tasks
    runner = RolloutRunner(config.rollout, RequestLimit(config.concurrency))
    resources = RolloutResources()
    judge = Rewards(config.eval.rewards or config.rewards, pool=resources.scoring) if config.evaluates else None
    policy = await taking_images_of(data, await connect_policy(config, folder, connect, console))
    state = folder.state
    resources = await with_shadow(config, policy, resources)
    resources.store.update(state.store if state else {})
    filters = GroupFilters(config.filters)
    batches = await _batch_source(config, folder, policy, task_sampler, runner, resources, stop, filters)
    critic = await _critic(config, policy, state)
    reference = await _reference(config, policy, state)
    columns = _columns(config, policy, reference, critic, runner.requests)
    algorithm = Algorithm(config.algorithm, policy.extensions, columns, config.seed, config.group_size, config.updates)
    _announce(config, algorithm, console)
    _restore(state, task_sampler, algorithm, config.seed)
    await batches.restore(state.batches if state else BatchSourceState())
    try:
        run_monitors = monitors.build(config.monitors, _run_info(config, folder, policy), console)
    except BaseException:
        await policy.close()
        raise
    timeline = Timeline(folder.path)
    try:
        yield Run(
            config=config,
            folder=folder,
            policy=policy,
            task_sampler=task_sampler,
            batches=batches,
            filters=filters,
            algorithm=algorithm,
            evaluator=Evaluator(
                config.eval, held_out if judge else {}, eval_workflow_maker(config, resources), config.seed, runner
            ),
            rewards=judge,
            monitors=run_monitors,
            reference=reference,
            critic=critic,
            demonstrations=_demonstrations(config, data, policy, state),
            store=resources.store,
            rates=TokenRates(runner.requests),
            shadow=resources.shadow,
            ending=EndCondition(config.until, state.ending if state else {}),
            stop=stop,
            states=DeferredStates(folder, policy, batches, config.checkpoint),
            timeline=timeline,
            overlap=OverlapMeter(lambda: batches.busy_seconds),
            backoff=Backoff(config.active_backoff, state.backoff if state else {}),
        )
    finally:
        await batches.close()
        await resources.close()
        timeline.close()
        run_monitors.close()
        await policy.close()


def _announce(config: RunConfig, algorithm: Algorithm, console: Console) -> None:
    console.print(f"[dim]{config.algorithm.type}: the loss is {algorithm.loss_location}[/]", highlight=False)
    if config.plugins:
        console.print(f"[dim]with plugins of {config.plugins}[/]", highlight=False)


async def with_shadow(config: RunConfig, policy: Policy, resources: RolloutResources) -> RolloutResources:
    """The resources with a ShadowService, if the run needs one."""
    if "shadow" not in config.services:
        return resources
    try:
        return replace(resources, shadow=open_shadow(config.shadow, policy, config.shadow_versions))
    except BaseException:
        await policy.close()
        raise


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


async def _batch_source(
    config: RunConfig,
    folder: RunFolder,
    policy: Policy,
    task_sampler: TaskSampler,
    runner: RolloutRunner,
    resources: RolloutResources,
    stop: StopSignal,
    filters: GroupFilters,
) -> BatchSource:
    policy.on_outage(runner.requests.suspend)
    if not config.uses_rollouts:
        return EmptyBatchSource()
    plan = sampling_plan(config, filters)
    buffer = buffers.build(config.buffer, folder.path, config.name)
    in_process = config.mode != "train"
    if not in_process:
        await agree(buffer, config.model_dump(mode="json"), "train")
    notes = CoordinationNotes(MemoryBuffer() if in_process else buffer)
    method = config.sync.method or ("memory" if in_process else "checkpoint")
    keep = config.sync.checkpoints_to_keep(config.staleness)
    publisher = WeightPublisher(policy, notes, method, keep, config.checkpoint.ttl_seconds)
    sampling = None
    if in_process:
        sampling = SamplingLoop(
            training_workflow(config, resources),
            LocalDraws(task_sampler, plan.groups, plan.seed),
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
        buffer, selector, policy, publisher, notes, config.sync, last_step=config.steps, sampling=sampling, stop=stop
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
) -> dict[str, ColumnSource]:
    """Sources of the per-token columns that an algorithm may request."""

    def logprobs_by(name: str) -> ColumnSource:
        async def logprobs(rows: Sequence[TrainingRow]) -> list[np.ndarray]:
            return await target_logprobs(requests.around(await policy.open_model(name)), rows)

        return logprobs

    sources: dict[str, ColumnSource] = {"reference": logprobs_by(reference), "entropy": policy.entropies}
    sources["proximal"] = policy.logprobs
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
