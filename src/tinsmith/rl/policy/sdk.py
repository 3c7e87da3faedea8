"""What everything that speaks to a server through the official SDK shares: errors of ours, and what the SDK leaves out.

Leaves out retries and polling, which the SDK does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal
from urllib.parse import urlsplit

import httpx
import tinker

from tinsmith.errors import ConfigError, TinsmithError, UserError
from tinsmith.rl.optimizer import OptimizerConfig

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0

log = logging.getLogger(__name__)


def adam_params(optimizer: OptimizerConfig, learning_rate: float) -> tinker.AdamParams:
    """The optimizer's settings at one learning rate."""
    return tinker.AdamParams(
        learning_rate=learning_rate,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        grad_clip_norm=optimizer.grad_clip_norm,
    )


@asynccontextmanager
async def translate_errors(action: str) -> AsyncIterator[None]:
    """Turn errors of the SDK into TinsmithErrors that name the action."""
    try:
        yield
    except tinker.AuthenticationError as error:
        raise UserError(f"The server refused the key while {action}.", "Set TINKER_API_KEY to one it knows.") from error
    except tinker.RequestFailedError as error:
        kind = UserError if str(error.category) == "user" else TinsmithError
        raise kind(f"The server failed at {action}: {error.message}") from error
    except tinker.APIStatusError as error:
        kind = UserError if error.status_code < 500 else TinsmithError
        raise kind(f"The server answered {error.status_code} while {action}: {_sentence(error)}") from error
    except tinker.TinkerError as error:
        raise TinsmithError(f"No answer from the server while {action}: {error}") from error


def _sentence(error: tinker.APIStatusError) -> str:
    """The server's own, where its answer has one."""
    match error.body:
        case {"detail": str(detail)}:
            return detail
        case _:
            return error.message


@asynccontextmanager
async def open_session(action: str, base_url: str, api_key: str) -> AsyncIterator[tinker.ServiceClient]:
    """A session at the server, which ends with the block only where the block fails.

    Raises ConfigError where no server answers, UserError where it refuses the key.
    """
    await check_reachable(base_url)
    async with translate_errors(f"{action} at {base_url}"):
        service = await asyncio.to_thread(tinker.ServiceClient, base_url=base_url, api_key=api_key)
        try:
            yield service
        except BaseException:
            await end_session(service, "errored")
            raise


async def end_session(service: tinker.ServiceClient, status: Literal["success", "errored"]) -> None:
    """The session is over at the server, and nothing is under way: Python aborts if it ends while the SDK still sends.

    Does not wait for a server that is gone. Raises nothing, so that the error that ended the work is reported.
    """
    try:
        async with translate_errors("ending the session"), asyncio.timeout(CLOSE_SECONDS):
            await service.close(status)
    except (TinsmithError, TimeoutError) as error:
        log.warning("The session could not be ended: %s", error)


async def extensions(base_url: str, api_key: str) -> frozenset[str]:
    """Every name under `extensions`. The SDK drops the key, and other servers have none."""
    async with httpx.AsyncClient(base_url=base_url, timeout=CONNECT_SECONDS) as client:
        try:
            answer = await client.get("/api/v1/get_server_capabilities", headers={"X-API-Key": api_key})
            as_tuple = answer.json().get("extensions", {}) if answer.is_success else {}
        except (httpx.HTTPError, ValueError):  # a server without capabilities has no extensions
            return frozenset()
    return frozenset(name for names in as_tuple.values() for name in names)


async def check_reachable(base_url: str) -> None:
    """Fail at once if no server answers; the SDK would wait for hours."""
    url = urlsplit(base_url)
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        if not url.hostname:
            raise ConfigError(f"'{base_url}' is no address of a server.", "Write http://HOST:PORT.")
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(url.hostname, port)
        writer.close()
        await writer.wait_closed()
    except (OSError, ValueError, TimeoutError) as error:
        cure = "Start one with tinsmith serve, or leave out the base URL and one is started for the run."
        raise ConfigError(f"No server answers at {base_url}.", cure) from error
