"""Sessions on a Tinker API server through the official SDK: inputs, error translation, reachability, server extensions.

The SDK retries and polls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import numpy as np
import tinker
from tinker.lib.retryable_exception import RetryableException

from tinsmith.errors import ConfigError, TinsmithError, UserError
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.types import EncodedPrompt, Tokens
from tinsmith.routed_experts import to_words

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0

log = logging.getLogger(__name__)


def adam_params(optimizer: OptimizerConfig, learning_rate: float) -> tinker.AdamParams:
    """The SDK's optimizer parameters for one learning rate."""
    return tinker.AdamParams(
        learning_rate=learning_rate,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        grad_clip_norm=optimizer.grad_clip_norm,
    )


def model_input(prompt: Tokens) -> tinker.ModelInput:
    """Tokens as the SDK sends them, with chunks of the images among them."""
    if not isinstance(prompt, EncodedPrompt):
        return tinker.ModelInput.from_ints(list(prompt))
    chunks, end = list[Any](), 0
    for placed in prompt.images:
        chunks += [tinker.EncodedTextChunk(tokens=prompt.tokens[end : placed.start])] if placed.start > end else []
        image = placed.image
        chunks.append(tinker.types.ImageChunk(data=image.file, format=image.format, expected_tokens=placed.length))
        end = placed.start + placed.length
    rest = prompt.tokens[end:]
    return tinker.ModelInput(chunks=[*chunks, *([tinker.EncodedTextChunk(tokens=rest)] if rest else [])])


def as_datum(row: TrainingRow, inputs: Mapping[str, np.ndarray]) -> tinker.Datum:
    """A row as the SDK sends it, with its routed experts if they are recorded; `inputs` are the arrays [N] that the
    loss reads besides the targets."""
    arrays = {"target_tokens": row.targets, **inputs}
    if row.routed_experts is not None:
        arrays["routed_experts"] = to_words(row.routed_experts)
    return tinker.Datum(
        model_input=model_input(EncodedPrompt(tokens=tuple(row.tokens.tolist()), images=row.images)),
        loss_fn_inputs={name: tinker.TensorData.from_numpy(values) for name, values in arrays.items()},
    )


@asynccontextmanager
async def translate_errors(action: str, not_found: str = "") -> AsyncIterator[None]:
    """Raise errors of the SDK as TinsmithErrors that name `action`, such as "sampling". `not_found` is the
    hint of an error 404."""
    try:
        yield
    except tinker.AuthenticationError as error:
        raise UserError(
            f"The server rejected the API key while {action}.",
            "Set TINKER_API_KEY to a valid key. A Tinsmith server keeps its own in api-key of its data folder.",
        ) from error
    except tinker.RequestFailedError as error:
        kind = UserError if str(error.category) == "user" else TinsmithError
        raise kind(f"The server failed while {action}: {error.message}") from error
    except tinker.APIStatusError as error:
        kind = UserError if error.status_code < 500 else TinsmithError
        hint = not_found if error.status_code == 404 else ""
        raise kind(f"The server returned status {error.status_code} while {action}: {_message(error)}", hint) from error
    except (RetryableException, ValueError) as error:  # raised by polls for a result that the server does not have
        if isinstance(error, ValueError) and "retrieving result" not in str(error):
            raise
        raise TinsmithError(
            f"The server has lost a request while {action}: {error}",
            "The same command continues from the last checkpoint, if there is one.",
        ) from error
    except tinker.TinkerError as error:
        raise TinsmithError(f"No response from the server while {action}: {error}") from error


def _message(error: tinker.APIStatusError) -> str:
    """The `detail` of the response, or else the message of the SDK."""
    match error.body:
        case {"detail": str(detail)}:
            return detail
        case _:
            return error.message


@asynccontextmanager
async def open_session(
    action: str, base_url: str, api_key: str, metadata: dict[str, str] | None = None
) -> AsyncIterator[tinker.ServiceClient]:
    """A session on the server, with this user_metadata. It ends if the block raises; otherwise the caller ends it.

    Raises ConfigError if no server responds, UserError if it rejects the key.
    """
    await check_reachable(base_url)
    async with translate_errors(f"{action} at {base_url}"):
        service = await asyncio.to_thread(
            tinker.ServiceClient, user_metadata=metadata, base_url=base_url, api_key=api_key
        )
        try:
            yield service
        except BaseException:
            await end_session(service, "errored")
            raise


async def end_session(service: tinker.ServiceClient, status: Literal["success", "errored"]) -> None:
    """End the session, and wait for its requests: Python aborts if it exits while the SDK is sending.

    Waits at most CLOSE_SECONDS. Failures are logged and not raised, so that an earlier error is reported.
    """
    try:
        async with translate_errors("ending the session"), asyncio.timeout(CLOSE_SECONDS):
            await service.close(status)
    except TimeoutError:  # it has no text of its own
        log.warning("The session did not end within %g s; its server ends it once this process is gone.", CLOSE_SECONDS)
    except TinsmithError as error:
        log.warning("Could not end the session: %s", error)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server says of itself beyond the Tinker API; the SDK does not return it."""

    extensions: frozenset[str] = frozenset()
    """Names of its extensions of the API; empty for other servers."""
    images: Mapping[str, bool] = field(default_factory=dict)
    """Whether a base model takes images, by its name; without the models of which the server does not say it."""
    general_path_faults: Mapping[str, str] = field(default_factory=dict)
    """Why a base model is computed several times slower than its architecture allows, by its name."""

    def warn(self, model: str) -> None:
        """Log what the server says against a base model."""
        if fault := self.general_path_faults.get(model):
            log.warning("%s is several times slower here than on the engine's fast path: %s", model, fault)


async def capabilities(base_url: str, api_key: str) -> Capabilities:
    """The server's capabilities; a server that does not answer has none."""
    async with httpx.AsyncClient(base_url=base_url, timeout=CONNECT_SECONDS) as client:
        try:
            response = await client.get("/api/v1/get_server_capabilities", headers={"X-API-Key": api_key})
            answer = response.json() if response.is_success else {}
        except (httpx.HTTPError, ValueError):
            return Capabilities()
    names_by_kind, models = answer.get("extensions", {}), answer.get("supported_models", [])
    return Capabilities(
        frozenset(name for names in names_by_kind.values() for name in names),
        {model["model_name"]: model["images"] for model in models if isinstance(model.get("images"), bool)},
        {model["model_name"]: model["general_path_fault"] for model in models if model.get("general_path_fault")},
    )


async def check_reachable(base_url: str) -> None:
    """Raises ConfigError if no server responds within CONNECT_SECONDS; the SDK would retry for hours."""
    url = urlsplit(base_url)
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        if not url.hostname:
            raise ConfigError(f"'{base_url}' is not the URL of a server.", "Write http://HOST:PORT.")
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(url.hostname, port)
        writer.close()
        await writer.wait_closed()
    except (OSError, ValueError, TimeoutError) as error:
        hint = "Start a server with tinsmith serve, or remove the base URL to start a server for the run."
        raise ConfigError(f"No server responds at {base_url}.", hint) from error
