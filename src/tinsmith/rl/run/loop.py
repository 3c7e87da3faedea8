"""The training loop: get a batch, train on it, finish the step. Synchronous training is staleness 0.

The server is reached through a `Connect` function. A loop of one's own opens its run with `open.open_run`.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from rich.console import Console

from tinsmith.plurals import counted
from tinsmith.rl.config import RunConfig
from tinsmith.rl.ending.stop import StopRequested, StopSignal, WorkCancelled
from tinsmith.rl.ending.until import EndCondition
from tinsmith.rl.run.open import assemble, open_folder, prepare
from tinsmith.rl.run.parts import Connect
from tinsmith.rl.run.run import Run
from tinsmith.rl.run.state import State

log = logging.getLogger(__name__)


async def train(config: RunConfig, connect: Connect, console: Console, stop: StopSignal | None = None) -> State:
    """Start a run, or resume the one in its folder, and return its final state. A finished run is left as it is.

    `stop` may end the run early; the state returned is then one to resume from.
    """
    config, data = prepare(config)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(open_folder(config))
        if folder.state is not None and _is_finished(config, folder.state) and not folder.goes_back:
            return folder.state
        run = await stack.enter_async_context(assemble(config, folder, connect, console, data, stop or StopSignal()))
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
            streamed = await run.stream(done + 1)
            batch = await run.next_batch(done + 1)
            await run.train(done + 1, batch.groups, streamed)
            done += 1
            ended = await run.finish_step(done)
    except StopRequested as stopped:
        await run.stop_after(done, evaluation_due=isinstance(stopped, WorkCancelled))
    state = run.checkpoints.folder.state
    assert state is not None  # the last step saves, and an early stop does
    return state
