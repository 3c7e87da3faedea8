"""Sampling alone, into a buffer from which another process trains; by the weights that it publishes there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import numpy as np
from rich.console import Console

from tinsmith.rl import metrics, monitors
from tinsmith.rl.config import RunConfig
from tinsmith.rl.data.tasks import TaskSampler, split
from tinsmith.rl.monitors.base import Monitors, RunInfo
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.base import SamplingClients
from tinsmith.rl.rollouts import buffers
from tinsmith.rl.rollouts.buffers.base import Buffer
from tinsmith.rl.rollouts.coordination import (
    POLL_SECONDS,
    CoordinationNotes,
    SamplerStatus,
    SharedWeights,
    TrainingEnded,
)
from tinsmith.rl.rollouts.producer import Batch, BatchProducer
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.rollouts.weight_sync import ChangeNotifier
from tinsmith.rl.run import folder_path
from tinsmith.rl.run_folder import RunFolder
from tinsmith.rl.train import resolve_steps, sampling_plan, workflow_context


async def explore(config: RunConfig, connect: Callable[[], Awaitable[SamplingClients]], console: Console) -> int:
    """Begins, or goes on after the last batch that is in the buffer; returns how many there are in all."""
    config = resolve_steps(config)
    path = folder_path(config)
    folder = RunFolder.open(path, config.model_dump(mode="json"), resume=config.resume, part="explore")
    try:
        buffer = buffers.build(config.buffer, path, config.name)
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        info = RunInfo(
            name=f"{config.name} explore",
            folder=path / "explore",
            steps=config.steps,
            settings=config.model_dump(mode="json"),
        )
        peers = await connect()
        told = monitors.build(config.monitors, info, console)
        try:
            return await _explored(config, buffer, peers, told, console)
        finally:
            told.close()
            await peers.close()
            await buffer.close()
    finally:
        folder.close()


async def _explored(config: RunConfig, buffer: Buffer, peers: SamplingClients, told: Monitors, console: Console) -> int:
    notes, changes = CoordinationNotes(buffer), ChangeNotifier()
    if 0 < (before := (await notes.training()).ended_at) < config.steps:
        console.print(f"Training ended after step {before}: it must be started with more steps too.", highlight=False)
    weights = SharedWeights(notes, peers, config.sync.timeout)
    task_sampler, _ = split(config.tasks, config.seed)
    last = await _last(buffer, notes)

    async def put(batch: Batch) -> None:
        nonlocal last
        await buffer.put(batch)
        task_sampler.update(batch.groups)
        last = _after(last, batch).model_copy(update={"order": task_sampler.state})
        await notes.tell_sampling(last)
        version = batch.groups[0].version
        told.metrics(batch.step, {**metrics.group_metrics(batch.groups, version), **batch.numbers})

    agent_endpoint = AgentEndpoint()
    workflow = config.workflow.make(workflow_context(config, agent_endpoint))
    runner = RolloutRunner(config.rollout, asyncio.Semaphore(config.concurrency))
    sampler = BatchProducer(workflow, task_sampler, weights, sampling_plan(config), runner, changes, put)
    sampler.go_on(last.done)
    _place(task_sampler, last)
    await notes.tell_sampling(last)
    try:
        await _until_done(config, sampler, weights, notes, changes, before)
    except TrainingEnded as end:
        if end.step < config.steps:
            console.print(f"Training has ended after step {end.step}, so sampling ends too.", highlight=False)
    except Exception as error:
        await sampler.close()  # else what is under way is put, and told over this
        await notes.tell_sampling(last.model_copy(update={"state": "failed", "reason": str(error)}))
        raise
    finally:
        await sampler.close()
        await agent_endpoint.close()
    await notes.tell_sampling(last.model_copy(update={"state": "ended"}))
    return sampler.done


async def _until_done(
    config: RunConfig,
    sampler: BatchProducer,
    weights: SharedWeights,
    notes: CoordinationNotes,
    changes: ChangeNotifier,
    before: int,
) -> None:
    """Returns when all batches are put. Raises what broke the sampling off, TrainingEnded among it.

    Where training had ended `before` that step already, it is waited for: it may go on with more steps.
    """
    taken = 0
    if config.sync.style != "fixed":
        sampler.room = lambda: sampler.begun - taken < config.buffer.capacity
    sampler.start()
    while True:
        seen = changes.rings
        if (fault := sampler.fault) is not None:
            raise fault
        if sampler.complete and sampler.done == sampler.begun:
            return
        training = await notes.training()
        if training.ended_at >= config.steps or training.ended_at not in (0, before):
            raise TrainingEnded(training.ended_at)
        taken = training.taken
        if config.sync.style == "live":
            await weights.look()
        await changes.rung_since(seen, POLL_SECONDS)
        changes.ring()


async def _last(buffer: Buffer, notes: CoordinationNotes) -> SamplerStatus:
    """Where an earlier process was: what it told, or the last batch, where it was killed between the two."""
    told = await notes.sampling()
    newest = max(await buffer.numbers(), default=0)
    if newest > told.done:
        told = _after(told, await buffer.get(newest))
    return told.model_copy(update={"state": "under way", "reason": ""})


def _after(last: SamplerStatus, batch: Batch) -> SamplerStatus:
    """With that batch too. What any has asked is not asked again, be it for a batch before, in place of what failed."""
    return last.model_copy(update={"done": batch.step, "cursor": max(last.cursor, batch.cursor)})


def _place(task_sampler: TaskSampler, last: SamplerStatus) -> None:
    if last.done:
        task_sampler.restore(last.cursor, last.order)
