"""The training loop.

`loop` is the only built-in loop: get a batch, compute its updates, apply them, log, save. Synchronous training is
staleness 0. The server is reached through a `Connect` function.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from rich.console import Console

from tinsmith.errors import TinsmithError
from tinsmith.plurals import counted
from tinsmith.rl.config import RunConfig
from tinsmith.rl.ending.stop import StopRequested, StopSignal, WorkCancelled
from tinsmith.rl.ending.until import EndCondition
from tinsmith.rl.guards.watchdog import watch_event_loop
from tinsmith.rl.record import logs, monitors
from tinsmith.rl.run.folder import RunFolder
from tinsmith.rl.run.open import assemble
from tinsmith.rl.run.parts import RunData, folder_path, resolve_steps
from tinsmith.rl.run.run import Connect, Run, StepTimer
from tinsmith.rl.run.state import State

log = logging.getLogger(__name__)


async def train(config: RunConfig, connect: Connect, console: Console, stop: StopSignal | None = None) -> State:
    """Start a run, or resume the one in its folder, and return its final state. A finished run is left as it is.

    `stop` may end the run early; the state returned is then one to resume from.
    """
    config, data = _prepared(config)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_opened(config))
        if folder.state is not None and _is_finished(config, folder.state) and not folder.goes_back:
            return folder.state
        run = await stack.enter_async_context(_started(config, folder, connect, console, data, stop))
        state = await loop(run)
        if not run.stop.stopped_at:
            log.info("Finished: %s; final weights: %s", counted(state.step, "step"), state.path)
        return state


def _is_finished(config: RunConfig, state: State) -> bool:
    ended = state.step >= config.steps or bool(EndCondition(config.until, state.ending).reason)
    return ended and not state.evaluation_due


async def loop(run: Run) -> State:
    """Take all remaining steps, or stop early if `run.stop` says so; returns the state that was saved last."""
    done, last = run.steps().start - 1, run.config.steps
    run.stop.begin()
    try:
        ended = await run.evaluate_before_training()
        while not ended and done < last:
            run.stop.check()
            await take_step(run, done + 1)
            done += 1
            ended = await run.finish_step(done)
    except StopRequested as stopped:
        await run.stop_after(done, evaluation_due=isinstance(stopped, WorkCancelled))
    assert run.folder.state is not None  # the last step saves, and an early stop does
    return run.folder.state


async def take_step(run: Run, step: int) -> None:
    """Get the batch of `step`, train on it, and log it. Raises StopRequested before training if the run is to stop."""
    await run.folder.wait_for_room(run.stop)
    timer = StepTimer()
    streamed = await run.stream(step)
    batch = await run.next_batch(step)
    timer.lap("rollouts")
    await run.train(step, batch.groups, streamed)
    timer.lap("update")
    run.log(step, timer)


@asynccontextmanager
async def open_run(
    config: RunConfig, connect: Connect, console: Console, stop: StopSignal | None = None
) -> AsyncIterator[Run]:
    """A run that is ready for its next step, for a custom training loop; `loop` is the built-in loop."""
    config, data = _prepared(config)
    with _opened(config) as folder:
        async with _started(config, folder, connect, console, data, stop) as run:
            yield run


def _prepared(config: RunConfig) -> tuple[RunConfig, RunData]:
    data = RunData(config)
    return resolve_steps(config, data), data


@contextmanager
def _opened(config: RunConfig) -> Iterator[RunFolder]:
    settings = config.model_dump(mode="json")
    folder = RunFolder.open(folder_path(config), settings, resume=config.resume is True, resume_from=config.resume_from)
    try:
        yield folder
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
            raise
        raise TinsmithError(
            f"The run folder {folder.path} cannot be written: {error.strerror}.",
            "Free space on its disk; the same command then continues from the last checkpoint, if there is one.",
        ) from error
    finally:
        folder.close()


@asynccontextmanager
async def _started(
    config: RunConfig,
    folder: RunFolder,
    connect: Connect,
    console: Console,
    data: RunData,
    stop: StopSignal | None = None,
) -> AsyncIterator[Run]:
    stop = stop or StopSignal()
    with logs.log_to_folder(folder.path, config.log_level):
        monitors.announce(config.monitors, folder.path, console)
        async with assemble(config, folder, connect, console, data, stop) as run:
            start = run.steps().start
            log.info("%s: starting at step %d of %d, in %s", config.name, start, config.steps, folder.path)
            if 1 < start <= config.steps:
                console.print(f"[dim]continuing at step {start} of {config.steps}[/]", highlight=False)
            with watch_event_loop(config.rollout.max_blocking, keep_signals=stop.watches_signals):
                yield run
