"""Mode explore: sample into a buffer, with the weights that the training process publishes.

Several processes of this mode may sample for one run, on one machine or on many: each has a name, and draws its tasks
from a record in the buffer (`rollouts/task_draws.py`). What a process has done is in the buffer, not in its folder.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import numpy as np
from rich.console import Console

from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.ending.stop import StopRequested, StopSignal
from tinsmith.rl.guards.watchdog import watch_event_loop
from tinsmith.rl.policy.models import Models
from tinsmith.rl.policy.request_limit import RequestLimit, TokenRates
from tinsmith.rl.record import monitors
from tinsmith.rl.record.layout import Layout, explore_part
from tinsmith.rl.record.monitors.base import Monitors, RunInfo
from tinsmith.rl.record.recorder import record_sampled
from tinsmith.rl.rollouts import buffers
from tinsmith.rl.rollouts.buffers.base import Buffer
from tinsmith.rl.rollouts.coordination import CoordinationNotes, SamplerStatus
from tinsmith.rl.rollouts.filters import GroupFilters
from tinsmith.rl.rollouts.progress import Batch
from tinsmith.rl.rollouts.resources import RolloutResources
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.rollouts.sampling_loop import SamplingLoop, TrainingEnded
from tinsmith.rl.rollouts.task_draws import NameTakenError, SharedDraws
from tinsmith.rl.run.agreement import agree
from tinsmith.rl.run.folder import RunFolder
from tinsmith.rl.run.parts import (
    RunData,
    check_images,
    folder_path,
    open_environments,
    resolve_steps,
    sampling_plan,
    training_workflow,
)


async def explore(
    config: RunConfig,
    connect: Callable[[], Awaitable[Models]],
    console: Console,
    stop: StopSignal | None = None,
) -> int:
    """Start sampling, or resume what a process of this name has begun. Returns the number of batches of the run so far.

    At `stop`, the batches in flight have the grace period to finish; the training process waits for a restart.
    """
    stop = stop or StopSignal()
    data = RunData(config)
    config = resolve_steps(config, data)
    path, part = folder_path(config), explore_part(config.sampler)
    is_new = not Layout(path).part(part).settings.exists()
    folder = RunFolder.open(path, config.model_dump(mode="json"), resume=config.resume is True, part=part)
    path = folder.path
    try:
        buffer = buffers.build(config.buffer, folder.layout.buffer, config.name)
        try:
            same_data = {"seed": config.seed, "tasks (their number)": data.tasks[0].size}
            await agree(buffer, config.model_dump(mode="json"), part, same_data)
        except ConfigError:
            await buffer.close()
            if is_new:  # the same folder then takes the settings that the others have
                folder.layout.part(part).settings.unlink()
            raise
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        monitors.announce(config.monitors, path / part, console)
        await check_images(data, models := await connect())
        info = RunInfo(
            name=f"{config.name} {part}",
            folder=path / part,
            steps=config.steps,
            settings=config.model_dump(mode="json"),
            decode=models.chat.decode,
        )
        run_monitors = monitors.build(config.monitors, info, console)
        resources = RolloutResources()
        try:
            await open_environments(config, None, resources)
            notes = CoordinationNotes(buffer, config.sampler)
            draws = SharedDraws(buffer, data.tasks[0], config.sampler, config.groups_per_step, config.seed)
            exploration = _Exploration(config, buffer, notes, draws, models, run_monitors, resources)
            with watch_event_loop(config.rollout.max_blocking):
                return await exploration.run(console, stop)
        finally:
            await resources.close()
            run_monitors.close()
            await models.close()
            await buffer.close()
    finally:
        folder.close()


class _Exploration:
    """The sampling loop of a process of mode explore, and its status in the buffer."""

    def __init__(
        self,
        config: RunConfig,
        buffer: Buffer,
        notes: CoordinationNotes,
        draws: SharedDraws,
        models: Models,
        run_monitors: Monitors,
        resources: RolloutResources,
    ) -> None:
        self._config, self._monitors = config, run_monitors
        self._notes, self._draws = notes, draws
        self._status = SamplerStatus()
        runner = RolloutRunner(config.rollout, RequestLimit(config.concurrency))
        models.on_outage(runner.requests.suspend)
        self._rates = TokenRates(runner.requests)
        self._loop = SamplingLoop(
            training_workflow(config, resources),
            draws,
            lambda record: models.open_checkpoint(record.path, record.version),
            sampling_plan(config, GroupFilters(config.filters)),
            runner,
            buffer,
            notes,
            capacity=config.buffer.capacity,
            timeout_hint="Check that the run's process of mode train is running; if it is, raise sync.timeout.",
            on_batch=self._on_batch,
        )

    async def run(self, console: Console, stop: StopSignal) -> int:
        """Sample until all batches are done, training ends or `stop`. Returns the number of batches in the buffer."""
        stop.begin("sampling stops after the batches in flight")
        steps = self._config.steps
        if 0 < (ended_before := (await self._notes.training()).ended_at) < steps:
            console.print(f"Training ended after step {ended_before}; start it with more steps too.", highlight=False)
        self._status = SamplerStatus(done=await self._draws.start())
        await self._notes.write_sampling(self._status)
        try:
            await self._loop.run(steps, ended_before, stop)
        except StopRequested:
            await self._loop.stop(stop.grace_left)
            stop.stopped_at = f"batch {self._status.done}"
            return self._status.done
        except TrainingEnded as end:
            if end.step < steps:
                console.print(f"Training ended after step {end.step}; sampling ends too.", highlight=False)
        except NameTakenError:  # the status is that of the other process
            raise
        except Exception as error:
            await self._loop.close()  # a batch in flight would replace the status
            await self._write_end("failed", str(error))
            raise
        finally:
            await self._loop.close()
        await self._draws.end()
        await self._write_end("ended", "")
        return self._status.done

    def _on_batch(self, batch: Batch, status: SamplerStatus) -> None:
        self._status = status
        record_sampled(self._monitors, batch, self._rates)

    async def _write_end(self, state: str, reason: str) -> None:
        await self._notes.write_sampling(self._status.model_copy(update={"state": state, "reason": reason}))
