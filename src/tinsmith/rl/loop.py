"""The loop: get a batch, score, update, log, save. Synchronous is staleness 0; there is no other loop."""

from __future__ import annotations

import logging

from rich.console import Console

from tinsmith.rl import logs
from tinsmith.rl.assemble import assemble
from tinsmith.rl.config import RunConfig
from tinsmith.rl.epochs import with_steps
from tinsmith.rl.resume import RunFolder, State
from tinsmith.rl.run import Clock, Connect, Run, anew, folder_of

log = logging.getLogger(__name__)


async def train(config: RunConfig, connect: Connect, console: Console) -> State:
    """Begins the run, or goes on with the one in its folder; returns where it ended. A finished run is left alone."""
    config = with_steps(anew(config))
    folder = RunFolder.open(folder_of(config), config.model_dump(mode="json"), resume=config.resume)
    try:
        if folder.state is not None and folder.state.step >= config.steps:
            return folder.state
        with logs.writing(folder.path, config.log_level):
            return await _logged(config, folder, connect, console)
    finally:
        folder.close()


async def _logged(config: RunConfig, folder: RunFolder, connect: Connect, console: Console) -> State:
    async with assemble(config, folder, connect, console) as run:
        log.info("%s: step %d of %d is next, in %s", config.name, run.steps().start, config.steps, folder.path)
        state = await loop(run)
    log.info("Finished: %d steps; weights to go on from: %s", state.step, state.path)
    return state


async def loop(run: Run) -> State:
    """Every step that is still to do."""
    await run.begin()
    for step in run.steps():
        clock = Clock()
        batch = await run.supply.next(step)
        clock.lap("rollouts")
        groups = run.kept(batch.groups)
        update = await run.algorithm.score(step, groups, run.lessons())
        version = run.policy.version
        numbers = await run.update(step, update)
        clock.lap("update")
        await run.supply.trained(step)
        run.log(step, batch, len(groups), version, numbers, clock)
        await run.save_and_evaluate(step)
    assert run.folder.state is not None  # the last step saves
    return run.folder.state
