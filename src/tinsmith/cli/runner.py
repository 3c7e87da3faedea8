"""What `tinsmith run` and `tinsmith demo` do with a run: train or sample, and say how to resume after an interruption.

Imports stand inside the functions, so that --help is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tinsmith.plurals import counted

if TYPE_CHECKING:
    from rich.console import Console

    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.diagnosis import Diagnosis
    from tinsmith.rl.run.state import State

T = TypeVar("T")


def train(settings: RunConfig, console: Console, *, always_new_folder: bool = False) -> tuple[RunConfig, State]:
    """Run to the end. Returns settings and final state of the last stage that trains. Raises StoppedEarly.

    `always_new_folder`: the same command would choose another folder, so that resuming needs the folder's name.
    """
    from tinsmith.rl.run.parts import with_fresh_folder
    from tinsmith.runner import run_to_end, stop_signal

    settings = with_fresh_folder(settings)
    needs_folder = always_new_folder or settings.resume is not True
    stop = stop_signal(settings)
    with _resume_hint(settings, lambda: _place_to_resume(settings), needs_folder=needs_folder):
        stage, state = run_to_end(settings, console, stop)
    if stop.stopped_at:
        raise StoppedEarly(
            f"{stage.name}: stopped by {stop.reason} after {stop.stopped_at}, with the checkpoint {state.path}",
            f"The same command{_folder_words(settings, needs_folder=needs_folder)} continues from there.",
            by_user=stop.by_user,
        )
    return stage, state


def diagnosis_of(settings: RunConfig) -> Diagnosis:
    """The diagnosis of the run in its folder."""
    from tinsmith.rl.diagnosis import diagnose
    from tinsmith.rl.record.monitors.jsonl import read_metrics
    from tinsmith.rl.run.parts import folder_path

    return diagnose(settings.model_dump(mode="json"), read_metrics(folder_path(settings)))


class StoppedEarly(Exception):
    """A run stopped before its last step, to be continued: by its time limit, SIGTERM or Ctrl-C."""

    def __init__(self, message: str, hint: str, *, by_user: bool) -> None:
        super().__init__(message, hint)
        self.by_user = by_user


def in_fresh_folder(settings: RunConfig) -> RunConfig:
    """The settings with the folder that the run writes to: another one if there is a run and `resume` is rename."""
    from tinsmith.rl.record.layout import BENCH
    from tinsmith.rl.run.parts import with_fresh_folder

    return (
        settings
        if settings.mode == "explore"
        else with_fresh_folder(settings, BENCH if settings.mode == "bench" else "")
    )


def sample(settings: RunConfig, fresh: RunConfig, console: Console) -> None:
    """Run mode explore, which samples for a training process, or mode bench, which compares checkpoints.

    `fresh`: the settings in the folder of the comparison (`in_fresh_folder`).
    """
    import asyncio

    from rich.markup import escape

    from tinsmith.rl.bench import bench
    from tinsmith.rl.explore import explore
    from tinsmith.rl.guards import event_loop
    from tinsmith.rl.policy.server_watch import ServerWatch
    from tinsmith.rl.policy.tinker_models import TinkerModels
    from tinsmith.rl.run.parts import folder_path
    from tinsmith.runner import server, stop_signal
    from tinsmith.terminal import waiting

    stop = stop_signal(settings)
    with ExitStack() as stack, stop.at_signals():
        watch = ServerWatch(settings.model.wait)

        async def connect() -> TinkerModels:
            with waiting(console, f"Connecting to {escape(settings.model.name)}"):
                base_url, api_key = await asyncio.to_thread(stack.enter_context, server(settings))
                return await TinkerModels.connect(settings.model, base_url, api_key, watch)

        async def watched(work: Coroutine[Any, Any, T]) -> T:
            async with watch.watching():
                return await work

        if settings.mode == "bench":
            event_loop.run(watched(bench(fresh, connect, console, of=folder_path(settings), stop=stop)))
        else:
            where = "continues after the last batch in the buffer, or with the first"
            with _resume_hint(settings, lambda: where, needs_folder=settings.resume is not True):
                count = event_loop.run(watched(explore(settings, connect, console, stop)))
            console.print(f"{escape(settings.name)}: sampled {counted(count, 'batch')}", highlight=False)
    if stop.stopped_at:
        words = _folder_words(settings, needs_folder=settings.resume is not True)
        raise StoppedEarly(
            f"{settings.name}: stopped by {stop.reason} after {stop.stopped_at}",
            f"The same command{words} continues." if settings.mode == "explore" else "The same command starts again.",
            by_user=stop.by_user,
        )


@contextmanager
def _resume_hint(settings: RunConfig, where: Callable[[], str], *, needs_folder: bool) -> Iterator[None]:
    """Make an interruption say how to resume the run, and where that is by then."""
    try:
        yield
    except KeyboardInterrupt:
        words = _folder_words(settings, needs_folder=needs_folder)
        raise KeyboardInterrupt(f"the same command{words} {where()}") from None


def _place_to_resume(settings: RunConfig) -> str:
    """What the same command does after an interruption: it continues from the last checkpoint, if there is one."""
    from tinsmith.rl.run.parts import folder_path
    from tinsmith.rl.run.state import read_state

    saved = [(stage, state) for stage in settings.runs if (state := read_state(folder_path(stage))) is not None]
    if not saved:
        return "starts again: no checkpoint was saved yet"
    stage, state = saved[-1]
    of_stage = f" of stage {stage.name.rpartition(' ')[2]}" if settings.stages else ""
    return f"resumes from the last checkpoint, after step {state.step}{of_stage}"


def _folder_words(settings: RunConfig, *, needs_folder: bool) -> str:
    from tinsmith.rl.run.parts import folder_path

    return f" with folder={folder_path(settings)} resume=true" if needs_folder else ""
