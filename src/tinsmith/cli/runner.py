"""What `tinsmith run` and `tinsmith demo` do with a run: train or sample, and say how to resume after an interruption.

Imports stand inside the functions, so that --help is fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.run_folder import State


def train(settings: RunConfig, console: Console, *, always_new_folder: bool = False) -> tuple[RunConfig, State]:
    """Run to the end. Returns settings and final state of the last stage that trains.

    `always_new_folder`: the same command would choose another folder, so that resuming needs the folder's name.
    """
    from tinsmith.rl.run import with_fresh_folder
    from tinsmith.runner import run_to_end

    settings = with_fresh_folder(settings)
    with _resume_hint(settings, needs_folder=always_new_folder or settings.resume is not True):
        return run_to_end(settings, console)


def sample(settings: RunConfig, console: Console) -> None:
    """Run mode explore, which samples for a training process, or mode bench, which compares checkpoints."""
    import asyncio

    from rich.markup import escape

    from tinsmith.rl.bench import bench
    from tinsmith.rl.explore import explore
    from tinsmith.rl.policy.tinker_sampling import TinkerSamplingClients
    from tinsmith.rl.run import folder_path, with_fresh_folder
    from tinsmith.runner import server

    with ExitStack() as stack:

        async def connect() -> TinkerSamplingClients:
            with console.status(f"Connecting to {settings.model.name}"):
                base_url, api_key = await asyncio.to_thread(stack.enter_context, server(settings))
                return await TinkerSamplingClients.connect(settings.model, base_url, api_key)

        if settings.mode == "bench":
            fresh = with_fresh_folder(settings, "bench")
            asyncio.run(bench(fresh, connect, console, of=folder_path(settings)))
            return
        with _resume_hint(settings, needs_folder=settings.resume is not True):
            count = asyncio.run(explore(settings, connect, console))
        console.print(f"{escape(settings.name)}: sampled {count} batches", highlight=False)


@contextmanager
def _resume_hint(settings: RunConfig, *, needs_folder: bool) -> Iterator[None]:
    """Make an interruption say how to resume the run."""
    from tinsmith.rl.run import folder_path

    try:
        yield
    except KeyboardInterrupt:
        words = f" with folder={folder_path(settings)} resume=true" if needs_folder else ""
        raise KeyboardInterrupt(f"the same command{words} resumes from the last checkpoint") from None
