"""Mode explore: sample into the store of a run, with the weights that the training process publishes.

Several processes of this mode may sample for one run, on one machine or on many: each has a name, and claims batches in
the store (`rollouts/store.py`). What a process has done is in the store, not in its folder.
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
from tinsmith.rl.rollouts.batch import Batch
from tinsmith.rl.rollouts.buffer import open_store
from tinsmith.rl.rollouts.filters import GroupFilters
from tinsmith.rl.rollouts.resources import RolloutResources
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.rollouts.sampler import NameTakenError, Sampler, TrainingEnded
from tinsmith.rl.rollouts.store import Store
from tinsmith.rl.run.folder import RunFolder, shared_settings
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
    settings = config.model_dump(mode="json")
    is_new = not Layout(path).part(part).settings.exists()
    folder = RunFolder.open(path, settings, resume=config.resume is True, part=part)
    own = folder.layout.part(part)
    try:
        store = open_store(config.buffer, folder.layout.buffer, config.name, shared=True)
        try:
            same_data = {"seed": config.seed, "tasks (their number)": data.tasks[0].size}
            await store.agree(part, {**shared_settings(settings), **same_data})
        except ConfigError:
            await store.close()
            if is_new:  # the same folder then takes the settings that the others have
                own.settings.unlink()
            raise
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        monitors.announce(config.monitors, own.path, console)
        await check_images(data, models := await connect())
        name = f"{config.name} {part}"
        chat = models.chat
        info = RunInfo(
            name=name,
            folder=own.path,
            steps=config.steps,
            settings=settings,
            decode=chat.decode,
            token_text=chat.token_text,
        )
        run_monitors = monitors.build(config.monitors, info, console)
        resources = RolloutResources()
        try:
            await open_environments(config, None, resources)
            with watch_event_loop(config.rollout.max_blocking):
                return await _sample(config, data, store, models, run_monitors, resources, console, stop)
        finally:
            await resources.close()
            run_monitors.close()
            await models.close()
            await store.close()
    finally:
        folder.close()


async def _sample(
    config: RunConfig,
    data: RunData,
    store: Store,
    models: Models,
    run_monitors: Monitors,
    resources: RolloutResources,
    console: Console,
    stop: StopSignal,
) -> int:
    """Sample until all batches are done, training ends or `stop`. Returns the number that all batches are done up
    to."""
    runner = RolloutRunner(config.rollout, RequestLimit(config.concurrency))
    models.on_outage(runner.requests.suspend)
    rates, steps = TokenRates(runner.requests), config.steps
    done = 0

    def on_batch(batch: Batch, up_to: int) -> None:
        nonlocal done
        done = up_to
        record_sampled(run_monitors, batch, rates)

    sampler = Sampler(
        training_workflow(config, resources),
        data.tasks[0],
        lambda record: models.open_checkpoint(record.path, record.version),
        sampling_plan(config, GroupFilters(config.filters)),
        runner,
        store,
        name=config.sampler,
        timeout_hint="Check that the run's process of mode train is running; if it is, raise sync.timeout.",
        on_batch=on_batch,
    )
    stop.begin("sampling stops after the batches in flight")
    ended_before = (await store.state()).ended_at
    done = await sampler.join()
    if 0 < ended_before < steps:
        console.print(f"Training ended after step {ended_before}; start it with more steps too.", highlight=False)
    try:
        await sampler.sample(stop, steps, ended_before)
    except StopRequested:
        await sampler.stop(stop.grace_left)
        stop.stopped_at = f"batch {done}"
        return done
    except TrainingEnded as end:
        if end.step < steps:
            console.print(f"Training ended after step {end.step}; sampling ends too.", highlight=False)
    except NameTakenError:  # the state is that of the other process
        raise
    except Exception as error:
        await sampler.report_failure(str(error))
        raise
    finally:
        await sampler.close()
    await sampler.leave()
    return done
