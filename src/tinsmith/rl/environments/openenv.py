"""The environment `openenv`: environments that a server of OpenEnv holds, such as a game or a browser.

A rollout is a session at the server's WebSocket /ws: it resets the environment with the seed of the task and steps it
with each reply. The server's HTTP routes /reset and /step hold no state between requests, so they are not used.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from tinsmith.errors import UserError
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.types import Message, Task, Turn
from tinsmith.rl.workflows.base import IndependentRollouts, Workflow, WorkflowContext, WorkflowPolicy
from tinsmith.rl.workflows.conversation import Terminated

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_REJECTED = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes of errors that the policy can correct."""


class OpenEnvironment(EnvironmentOptions):
    """An environment at a server of OpenEnv. Each task is a seed; the reward is the sum of the rewards of its steps."""

    type: Literal["openenv"] = "openenv"
    url: str
    """URL of the server, such as http://127.0.0.1:8000."""
    action: str = "message"
    """Field of the action that holds the text of a reply. Empty: a reply is the whole action, a JSON object."""
    observation: str = ""
    """Field of the observation that the policy reads; empty: all of it, as JSON."""
    prompt: str = ""
    """Text before the first observation."""
    system: str = ""
    """System message."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Values that each reset gets beside the seed."""
    seeds: int = Field(default=1000, ge=1)
    """Number of tasks: the seeds 0, 1, 2 and so on."""
    sessions: int = Field(default=1, ge=1)
    """Rollouts that play at once: at most max_concurrent_envs of the server, which is 1 unless it is set."""
    max_turns: int = Field(default=10, ge=1)
    """Maximum number of replies of a rollout."""
    timeout: float = Field(default=60.0, gt=0)
    """Time limit of a reset or a step, in seconds; the rollout fails after it."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"{url!r} is not a URL; write http://HOST:PORT")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _check_package(self) -> OpenEnvironment:
        if find_spec("websockets") is None:
            raise ValueError("environments of OpenEnv need the package websockets: pip install 'tinsmith[openenv]'")
        return self

    @override
    def tasks(self) -> Sequence[Task]:
        contents = (f"{self.url}, seed {seed}" for seed in range(self.seeds))
        return [
            Task(id=f"{self.title}/{seed}", messages=(Message(role="user", content=content),), extra={"seed": seed})
            for seed, content in enumerate(contents)
        ]

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return IndependentRollouts(_Play(self).rollout, context)


class _Play:
    """The workflow in a run, with the sessions that its rollouts share."""

    def __init__(self, config: OpenEnvironment) -> None:
        self._config, self._free = config, asyncio.Semaphore(config.sessions)

    async def rollout(self, task: Task, policy: WorkflowPolicy, seed: int) -> None:
        config, conversation = self._config, policy.conversation()
        async with self._free, _session(config) as session:
            state = await session.request("reset", {"seed": task.extra["seed"], **config.reset})
            messages = [Message(role="system", content=config.system)] if config.system else []
            messages.append(Message(role="user", content=f"{config.prompt}{_shown(state, config)}"))
            while not state.get("done"):
                if len(conversation.turns) == config.max_turns:
                    raise Terminated("max_turns")
                reply = await conversation.say(*messages)
                state = await self._step(session, reply)
                conversation.credit(float(state.get("reward") or 0.0))
                messages = [Message(role="user", content=_shown(state, config))]

    async def _step(self, session: _Session, reply: Turn) -> Mapping[str, Any]:
        """The state after a reply; for one that is no action, what is wrong with it."""
        try:
            return await session.request("step", _action(reply.text, self._config.action))
        except _RejectedAction as error:
            return {"error": f"Error: {error}"}


class _RejectedAction(ValueError):
    """The reply is no action of the environment."""


class _Session:
    """An environment of its own at the server."""

    def __init__(self, socket: ClientConnection, config: OpenEnvironment) -> None:
        self._socket, self._config = socket, config

    async def request(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The observation, reward and end after a reset or a step.

        Raises _RejectedAction for an action that the server refuses, UserError for any other error of it.
        """
        async with asyncio.timeout(self._config.timeout):
            await self._socket.send(json.dumps({"type": kind, "data": data}))
            response = json.loads(await self._socket.recv())
        state = response.get("data") or {}
        if response.get("type") != "error":
            return state
        message = str(state.get("message", "unknown error"))
        if kind == "step" and state.get("code") in _REJECTED:
            raise _RejectedAction(message)
        hint = (
            "Set sessions to the max_concurrent_envs of the server." if state.get("code") == "CAPACITY_REACHED" else ""
        )
        raise UserError(f"The OpenEnv server {self._config.url} answers {kind} with: {message}", hint or "See its log.")


@asynccontextmanager
async def _session(config: OpenEnvironment) -> AsyncIterator[_Session]:
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException

    address = config.url.replace("http", "ws", 1) if config.url.startswith("http") else config.url
    try:
        async with connect(f"{address}/ws", max_size=None, open_timeout=config.timeout) as socket:
            yield _Session(socket, config)
            await socket.send(json.dumps({"type": "close"}))
    except (OSError, WebSocketException) as error:
        if isinstance(error, TimeoutError):
            raise
        raise UserError(
            f"The OpenEnv server {config.url} is not reached: {error}", "Start it, or correct url."
        ) from error


def _action(text: str, field: str) -> dict[str, Any]:
    if field:
        return {field: text}
    begin, end = text.find("{"), text.rfind("}")
    try:
        action = json.loads(text[begin : end + 1])
    except ValueError as error:
        raise _RejectedAction(f"the reply holds no JSON object: {error}") from error
    if not isinstance(action, dict):
        raise _RejectedAction("the reply holds no JSON object")
    return action


def _shown(state: Mapping[str, Any], config: OpenEnvironment) -> str:
    """What the policy reads of a state."""
    if "error" in state:
        return str(state["error"])
    observation = state.get("observation", {})
    if not config.observation:
        return json.dumps(observation, ensure_ascii=False)
    if config.observation not in observation:
        names = ", ".join(observation)
        raise UserError(f"The observation has no field {config.observation!r}.", f"It has: {names}. Set observation.")
    value = observation[config.observation]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
