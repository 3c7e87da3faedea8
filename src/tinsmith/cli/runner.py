"""Start a run: connect to the server, or start one for the run, and train or sample.

Imports stand inside the functions, so that --help is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tinsmith.rl.config import RunConfig
    from tinsmith.rl.run import Connect
    from tinsmith.rl.run_folder import State
    from tinsmith.service.config import ServeConfig


def train(settings: RunConfig, console: Console, *, always_new_folder: bool = False) -> tuple[RunConfig, State]:
    """Run to the end. Returns the settings of the last stage and the final state.

    `always_new_folder`: the same command would choose another folder, so that resuming needs the folder's name.
    """
    import asyncio

    from tinsmith.rl.run import with_fresh_folder
    from tinsmith.rl.stages import run_stages

    settings = with_fresh_folder(settings)
    with ExitStack() as stack, _resume_hint(settings, needs_folder=always_new_folder or settings.resume is not True):
        return asyncio.run(run_stages(settings, connecting_to(settings, stack, console), console))


def connecting_to(settings: RunConfig, stack: ExitStack, console: Console) -> Callable[[RunConfig], Connect]:
    """A function from the settings of a stage to its connection. All stages share one server.

    A server that is started for the run stops when the stack closes.
    """
    import asyncio

    from tinsmith.rl.policy.tinker import TinkerPolicy

    addresses: list[tuple[str, str]] = []

    def connecting(stage: RunConfig) -> Connect:
        async def connect(state: str, version: int) -> TinkerPolicy:
            with console.status(f"Connecting to {stage.model.name}"):
                if not addresses:
                    addresses.append(await asyncio.to_thread(stack.enter_context, server(settings)))
                base_url, api_key = addresses[0]
                return await TinkerPolicy.connect(
                    stage.model, base_url, api_key, seed=stage.seed, state=state, version=version
                )

        return connect

    return connecting


def sample(settings: RunConfig, console: Console) -> None:
    """Run mode explore, which samples for a training process, or mode bench, which compares checkpoints."""
    import asyncio

    from rich.markup import escape

    from tinsmith.rl.bench import bench
    from tinsmith.rl.explore import explore
    from tinsmith.rl.policy.tinker_sampling import TinkerSamplingClients

    with ExitStack() as stack:

        async def connect() -> TinkerSamplingClients:
            with console.status(f"Connecting to {settings.model.name}"):
                base_url, api_key = await asyncio.to_thread(stack.enter_context, server(settings))
                return await TinkerSamplingClients.connect(settings.model, base_url, api_key)

        if settings.mode == "bench":
            asyncio.run(bench(settings, connect, console))
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


@contextmanager
def server(settings: RunConfig) -> Iterator[tuple[str, str]]:
    """The base URL and API key of the server to use; started here if no URL is set."""
    import os

    base_url = settings.model.base_url or os.environ.get("TINKER_BASE_URL", "")
    if base_url:
        from tinsmith.settings import changed_keys

        if unused := changed_keys(settings.service):
            keys = f"service.{', service.'.join(unused)}"
            sys.stderr.write(f"note: {keys}: not used, because the run connects to {base_url}\n")
        yield base_url, api_key(base_url)
        return
    if settings.shares_a_run:
        raise ConfigError(
            f"mode {settings.mode} is one of two processes and needs a server that both can reach.",
            "Start one with tinsmith serve, and set TINKER_BASE_URL and TINKER_API_KEY for both.",
        )
    from tinsmith.service.embedded import embedded

    with embedded(own_service(settings)) as (url, key):
        yield url, key


def own_service(settings: RunConfig) -> ServeConfig:
    """The service that a run starts where no server is named; its data folder is in the run folder."""
    from tinsmith.engine_options import DeviceOptions
    from tinsmith.rl.run import folder_path
    from tinsmith.service.config import ServeConfig

    service = settings.service
    return ServeConfig(
        models=(f"{settings.model.name}={service.source}" if service.source else settings.model.name,),
        data=folder_path(settings) / "service",
        engine=service.engine,
        **{name: service.__dict__[name] for name in DeviceOptions.model_fields},
    )


def api_key(base_url: str) -> str:
    """The API key in the environment: TINKER_API_KEY, or else TRINITY_API_KEY, as Trinity-RFT documents it."""
    import os

    tinker, trinity = os.environ.get("TINKER_API_KEY", ""), os.environ.get("TRINITY_API_KEY", "")
    if not (tinker or trinity):
        raise ConfigError(f"There is no API key for {base_url}.", "Set TINKER_API_KEY.")
    if tinker and trinity and tinker != trinity:
        sys.stderr.write("note: TINKER_API_KEY and TRINITY_API_KEY differ; TINKER_API_KEY is used\n")
    key = tinker or trinity
    if not key.startswith("tml-"):
        raise ConfigError(
            f"The API key for {base_url} does not begin with tml-, and the SDK sends no other.",
            "Set TINKER_API_KEY to a key of that server.",
        )
    return key
