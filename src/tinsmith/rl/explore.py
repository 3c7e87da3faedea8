"""Mode explore: sample into a buffer, with the weights that the training process publishes."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import numpy as np
from rich.console import Console

from tinsmith.rl import metrics, monitors
from tinsmith.rl.config import RunConfig
from tinsmith.rl.data.tasks import TaskSampler
from tinsmith.rl.ending.stop import StopRequested, StopSignal
from tinsmith.rl.guards.watchdog import watch_event_loop
from tinsmith.rl.monitors.base import Monitors, RunInfo
from tinsmith.rl.policy.base import SamplingClients
from tinsmith.rl.policy.request_limit import RequestLimit, TokenRates
from tinsmith.rl.rollouts import buffers
from tinsmith.rl.rollouts.buffers.base import Buffer
from tinsmith.rl.rollouts.coordination import CoordinationNotes, SamplerStatus
from tinsmith.rl.rollouts.progress import Batch
from tinsmith.rl.rollouts.resources import RolloutResources
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.rollouts.sampling_loop import SamplingLoop, TrainingEnded
from tinsmith.rl.run import folder_path
from tinsmith.rl.run_folder import RunFolder
from tinsmith.rl.run_parts import RunData, training_workflow
from tinsmith.rl.train import resolve_steps, sampling_plan


async def explore(
    config: RunConfig,
    connect: Callable[[], Awaitable[SamplingClients]],
    console: Console,
    stop: StopSignal | None = None,
) -> int:
    """Start sampling, or resume after the last batch in the buffer. Returns the total number of batches sampled.

    At `stop`, the batches in flight have the grace period to finish; the training process waits for a restart.
    """
    stop = stop or StopSignal()
    data = RunData(config)
    config = resolve_steps(config, data)
    path = folder_path(config)
    folder = RunFolder.open(path, config.model_dump(mode="json"), resume=config.resume is True, part="explore")
    path = folder.path
    try:
        buffer = buffers.build(config.buffer, path, config.name)
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        monitors.announce(config.monitors, path / "explore", console)
        clients = await connect()
        info = RunInfo(
            name=f"{config.name} explore",
            folder=path / "explore",
            steps=config.steps,
            settings=config.model_dump(mode="json"),
            decode=clients.chat.decode,
        )
        run_monitors = monitors.build(config.monitors, info, console)
        resources = RolloutResources()
        try:
            exploration = _Exploration(config, data.tasks[0], buffer, clients, run_monitors, resources)
            with watch_event_loop(config.rollout.max_blocking):
                return await exploration.run(console, stop)
        finally:
            await resources.close()
            run_monitors.close()
            await clients.close()
            await buffer.close()
    finally:
        folder.close()


class _Exploration:
    """The sampling loop of a process of mode explore, and its status in the buffer."""

    def __init__(
        self,
        config: RunConfig,
        task_sampler: TaskSampler,
        buffer: Buffer,
        clients: SamplingClients,
        run_monitors: Monitors,
        resources: RolloutResources,
    ) -> None:
        self._config, self._buffer, self._monitors = config, buffer, run_monitors
        self._notes = CoordinationNotes(buffer)
        self._task_sampler = task_sampler
        self._status = SamplerStatus()
        runner = RolloutRunner(config.rollout, RequestLimit(config.concurrency))
        clients.on_outage(runner.requests.suspend)
        self._rates = TokenRates(runner.requests)
        self._loop = SamplingLoop(
            training_workflow(config, resources),
            self._task_sampler,
            lambda record: clients.open_checkpoint(record.path, record.version),
            sampling_plan(config),
            runner,
            buffer,
            self._notes,
            capacity=config.buffer.capacity,
            timeout_hint="Check that the run's process of mode train is running; if it is, raise sync.timeout.",
            on_batch=self._on_batch,
        )

    async def run(self, console: Console, stop: StopSignal) -> int:
        """Sample until all batches are done, training ends or `stop`. Returns the number of the last batch."""
        stop.begin("sampling stops after the batches in flight")
        steps = self._config.steps
        if 0 < (ended_before := (await self._notes.training()).ended_at) < steps:
            console.print(f"Training ended after step {ended_before}; start it with more steps too.", highlight=False)
        self._status = await _last_status(self._buffer, self._notes)
        self._loop.resume_after(self._status.done)
        _restore_tasks(self._task_sampler, self._status)
        await self._notes.write_sampling(self._status)
        try:
            await self._loop.run(steps, ended_before, stop)
        except StopRequested:
            await self._loop.stop(stop.grace_left)
            stop.stopped_at = f"batch {self._loop.done}"
            return self._loop.done
        except TrainingEnded as end:
            if end.step < steps:
                console.print(f"Training ended after step {end.step}; sampling ends too.", highlight=False)
        except Exception as error:
            await self._loop.close()  # a batch in flight would replace the status
            await self._write_end("failed", str(error))
            raise
        finally:
            await self._loop.close()
        await self._write_end("ended", "")
        return self._loop.done

    def _on_batch(self, batch: Batch) -> SamplerStatus:
        self._task_sampler.update(batch.groups)
        self._status = _advanced(self._status, batch).model_copy(update={"order": self._task_sampler.state})
        version = batch.groups[0].version
        self._monitors.metrics(
            batch.step, {**metrics.group_metrics(batch.groups, version), **batch.numbers, **self._rates.lap()}
        )
        return self._status

    async def _write_end(self, state: str, reason: str) -> None:
        await self._notes.write_sampling(self._status.model_copy(update={"state": state, "reason": reason}))


async def _last_status(buffer: Buffer, notes: CoordinationNotes) -> SamplerStatus:
    """Status of an earlier process, including a batch that it put before it was killed without writing the status."""
    status = await notes.sampling()
    newest = max(await buffer.numbers(), default=0)
    if newest > status.done:
        status = _advanced(status, await buffer.get(newest))
    return status.model_copy(update={"state": "under way", "reason": ""})


def _advanced(status: SamplerStatus, batch: Batch) -> SamplerStatus:
    """Status after `batch`. The cursor never decreases: a later batch may have replaced failed tasks earlier."""
    return status.model_copy(update={"done": batch.step, "cursor": max(status.cursor, batch.cursor)})


def _restore_tasks(task_sampler: TaskSampler, status: SamplerStatus) -> None:
    if status.done:
        task_sampler.restore(status.cursor, status.order)
