"""What the commands that use the harness do between a run file and its end: the server, the connection, the run.

The server is the one that is named, or one of the run's own on this machine, which ends with it. Left out: words and
options (`cli/__init__.py`). Imports stand inside the functions, so that --help is quick.
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


def train(settings: RunConfig, console: Console, *, afresh: bool = False) -> tuple[RunConfig, State]:
    """The run of `settings`, on the server that it names or on one of its own that ends with it; its last stage.

    `afresh`: the same command would take another folder.
    """
    import asyncio

    from tinsmith.rl.run import with_fresh_folder
    from tinsmith.rl.stages import run_stages

    settings = with_fresh_folder(settings)
    with ExitStack() as stack, _going_on(settings, afresh or settings.resume is not True):
        return asyncio.run(run_stages(settings, connecting_to(settings, stack, console), console))


def connecting_to(settings: RunConfig, stack: ExitStack, console: Console) -> Callable[[RunConfig], Connect]:
    """From one stage's settings to a policy; all are on one server, which ends with the stack if it is our own."""
    import asyncio

    from tinsmith.rl.policy.tinker import TinkerPolicy

    found: list[tuple[str, str]] = []

    def connecting(one: RunConfig) -> Connect:
        async def connect(state: str, version: int) -> TinkerPolicy:
            with console.status(f"Connecting to {one.model.name}"):
                if not found:
                    found.append(await asyncio.to_thread(stack.enter_context, server(settings)))
                base_url, api_key = found[0]
                return await TinkerPolicy.connect(
                    one.model, base_url, api_key, seed=one.seed, state=state, version=version
                )

        return connect

    return connecting


def sample(settings: RunConfig, console: Console) -> None:
    """A process that trains nothing: it samples for another that does, or compares checkpoints."""
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
        with _going_on(settings, settings.resume is not True):
            count = asyncio.run(explore(settings, connect, console))
        console.print(f"{escape(settings.name)}: {count} batches are sampled", highlight=False)


@contextmanager
def _going_on(settings: RunConfig, named: bool) -> Iterator[None]:
    """An interruption in it says how to go on; `named`: the same command does so only with the folder beside it."""
    from tinsmith.rl.run import folder_path

    try:
        yield
    except KeyboardInterrupt:
        beside = f" with folder={folder_path(settings)} resume=true" if named else ""
        raise KeyboardInterrupt(f"the same command{beside} goes on from the last checkpoint") from None


@contextmanager
def server(settings: RunConfig) -> Iterator[tuple[str, str]]:
    """(base_url, api_key) of the server to use."""
    import os

    base_url = settings.model.base_url or os.environ.get("TINKER_BASE_URL", "")
    if base_url:
        from tinsmith.settings import changed_keys

        if told := changed_keys(settings.service):
            sys.stderr.write(f"note: service.{', service.'.join(told)}: {base_url} decides, as no service is started\n")
        yield base_url, api_key(base_url)
        return
    if settings.shares_a_run:
        raise ConfigError(
            f"mode {settings.mode} is one of two processes, and needs a server that both reach.",
            "Start one with tinsmith serve; set TINKER_BASE_URL and TINKER_API_KEY for both.",
        )
    from tinsmith.service.embedded import embedded

    with embedded(own_service(settings)) as (url, key):
        yield url, key


def own_service(settings: RunConfig) -> ServeConfig:
    """The service that a run starts where no server is named; its data stay in the run's folder."""
    from tinsmith.rl.run import folder_path
    from tinsmith.service.config import ServeConfig

    own = settings.service
    return ServeConfig(
        models=(f"{settings.model.name}={own.source}" if own.source else settings.model.name,),
        data=folder_path(settings) / "service",
        engine=own.engine,
        dtype=own.dtype,
        device=own.device,
        threads=own.threads,
    )


def api_key(base_url: str) -> str:
    """Of the environment. The name that Trinity-RFT's documents have counts where the SDK's own is not set."""
    import os

    first, second = os.environ.get("TINKER_API_KEY", ""), os.environ.get("TRINITY_API_KEY", "")
    if not (first or second):
        raise ConfigError(f"There is no key for {base_url}.", "Set TINKER_API_KEY.")
    if first and second and first != second:
        sys.stderr.write("note: TINKER_API_KEY and TRINITY_API_KEY differ; TINKER_API_KEY is used\n")
    key = first or second
    if not key.startswith("tml-"):
        raise ConfigError(
            f"The key for {base_url} does not begin with tml-, and the SDK sends no other.",
            "Set TINKER_API_KEY to a key of that server.",
        )
    return key
