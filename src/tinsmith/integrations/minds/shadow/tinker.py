"""Shadow steps on a Tinker API server, through the official SDK.

Forks are training models in sessions of their own, which end after a number of forks so that the server frees them:
the SDK cannot free a single model. They start from the policy itself; for older versions, and on servers without the
path @live, from saved weights. The weights of a version are saved when they are first needed. If rollouts may be older
than the policy, they are saved before each step of the policy, because a later request could not reach them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, cast

import numpy as np
import tinker
from typing_extensions import override

from tinsmith.errors import Unsupported, UserError
from tinsmith.integrations.minds.shadow.config import Mode, ShadowConfig, StepParams
from tinsmith.integrations.minds.shadow.records import Fork, ProbeDelta, ShadowGroup, ShadowServer, ShadowText
from tinsmith.integrations.minds.shadow.service import ShadowService
from tinsmith.rl.policy.sdk import end_session, translate_errors
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.policy.trainer import Trainer

EXTENSION = "shadow"
"""Name of the loss of virtual steps among the server's extensions."""
LIVE = "@live"
"""Name of the current weights of a model among the server's extensions."""
_VIRTUAL_OPTIMIZERS = {"sgd": "sgd", "adam_fresh": "adam", "adam_inherit": "adam_inherit"}

log = logging.getLogger(__name__)


class TinkerFork(Fork):
    """A training model that started from the policy's weights."""

    def __init__(self, client: tinker.TrainingClient, session: _Session) -> None:
        self._client, self._session = client, session

    @override
    async def step(
        self, group: ShadowGroup, params: StepParams, *, before: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """All requests are submitted before the first is awaited: the server takes them in this order."""
        probes = [text_datum(probe) for probe in group.probes]
        async with translate_errors("taking a shadow step"):
            first = [self._client.forward(probes, "cross_entropy")] if before and probes else []
            gradient = self._client.forward_backward([text_datum(text) for text in group.train], "cross_entropy")
            step = self._client.optim_step(_adam(params))
            last = [self._client.forward(probes, "cross_entropy")] if probes else []
            results = await asyncio.gather(*first, gradient, step, *last, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        return _logprobs(results[0]) if first else [], _logprobs(results[-1]) if last else []

    @override
    async def logprobs(self, texts: Sequence[ShadowText]) -> list[np.ndarray]:
        async with translate_errors("computing logprobs of a shadow step"):
            return _logprobs(await self._client.forward([text_datum(text) for text in texts], "cross_entropy"))

    @override
    def release(self) -> None:
        self._session.release()


class TinkerShadowServer(ShadowServer):
    """Forks and virtual steps of a TinkerTrainer."""

    def __init__(self, policy: TinkerTrainer, config: ShadowConfig, lag: int) -> None:
        """`lag`: how many versions rollouts may be older than the policy."""
        self._policy, self._config, self._lag = policy, config, lag
        self._version = policy.version
        self._sessions = _Sessions(policy, config.forks_per_session)
        self._saved: dict[int, asyncio.Task[str]] = {}
        self._deleting: set[asyncio.Task[None]] = set()
        policy.before_step.append(self._before_step)

    @property
    @override
    def version(self) -> int:
        return self._version

    @property
    @override
    def oldest(self) -> int:
        return self._version - self._lag

    @property
    @override
    def steps_virtually(self) -> bool:
        return EXTENSION in self._policy.models.extensions

    @property
    @override
    def live_forks(self) -> int:
        return self._sessions.live

    @override
    async def fork(self, version: int, *, inherit: bool) -> TinkerFork:
        """A server with the path @live forks the policy itself, without saved weights."""
        if LIVE in self._policy.models.extensions and version == self._version:
            path = f"tinker://{self._policy.client.model_id}/weights/{LIVE}"
            fork = await self._sessions.fork(path, inherit, self._config.ttl_seconds)
            if version == self._version:
                return fork
            fork.release()  # a step of the policy came between
        return await self._sessions.fork(await self._state(version), inherit, self._config.ttl_seconds)

    @override
    async def virtual(
        self, groups: Sequence[ShadowGroup], version: int, params: StepParams, mode: Mode
    ) -> list[tuple[ProbeDelta, ...]]:
        # Without an await between this comparison and the request, no step of the policy comes between them.
        at = "" if version == self._version else await self._state(version)
        config = {
            "shadow/at": at,
            "shadow/mode": mode,
            "shadow/opt": _VIRTUAL_OPTIMIZERS[params.optimizer],
            "shadow/lr": params.learning_rate,
        }
        if params.optimizer != "sgd":
            config |= {"shadow/beta1": params.beta1, "shadow/beta2": params.beta2, "shadow/eps": params.eps}
        roles = [
            (number, role, text)
            for number, group in enumerate(groups)
            for role, texts in enumerate((group.train, group.probes))
            for text in texts
        ]
        data = [text_datum(text, shadow_group=number, shadow_role=role) for number, role, text in roles]
        async with translate_errors("taking virtual shadow steps"):
            result = await self._policy.client.forward(data, cast(Any, EXTENSION), cast(Any, config))
        effects: list[list[ProbeDelta]] = [[] for _ in groups]
        for (number, role, text), outputs in zip(roles, result.loss_fn_outputs, strict=True):
            if role:
                effects[number].append(_effect(text, {name: data.to_numpy() for name, data in outputs.items()}))
        return [tuple(values) for values in effects]

    @override
    async def close(self) -> None:
        self._policy.before_step.remove(self._before_step)
        await asyncio.gather(*map(self._delete, self._saved.values()), *self._deleting)
        await self._sessions.close()

    def _before_step(self) -> None:
        """Called before a step of the policy is submitted. Requests of this moment still read the old weights."""
        if self._lag and self._version not in self._saved:
            self._save()
        self._version += 1
        for version in [version for version in self._saved if version < self.oldest]:
            task = asyncio.create_task(self._delete(self._saved.pop(version)))
            self._deleting.add(task)
            task.add_done_callback(self._deleting.discard)

    async def _delete(self, saving: asyncio.Task[str]) -> None:
        (path,) = await asyncio.gather(saving, return_exceptions=True)
        if isinstance(path, str):
            await self._policy.models.delete_checkpoint(path)

    def _save(self) -> asyncio.Task[str]:
        name = f"shadow-{self._version:06}"
        saving = self._policy.client.save_state(name, ttl_seconds=self._config.ttl_seconds, overwrite=True)
        self._saved[self._version] = asyncio.create_task(_path(saving))
        return self._saved[self._version]

    async def _state(self, version: int) -> str:
        """Path of the saved weights of a version."""
        task = self._saved.get(version)
        if task is None and version == self._version:
            task = self._save()
        if task is None:
            raise UserError(
                f"The weights of version {version} are not saved for shadow steps; the policy is at version "
                f"{self._version}.",
                "Ask for the newest version.",
            )
        try:
            return await asyncio.shield(task)  # other rollouts wait for it too
        except Exception:
            self._saved.pop(version, None)
            raise


def open_shadow(config: ShadowConfig, policy: Trainer | None, older_versions: int) -> ShadowService:
    """The ShadowService of a policy. Raises ConfigError if the server cannot take the steps of the settings."""
    if not isinstance(policy, TinkerTrainer):
        raise Unsupported("Shadow steps need a policy on a Tinker server.", "Leave out what needs them.")
    return ShadowService(config, TinkerShadowServer(policy, config, older_versions))


class _Session:
    """A session for forks. It ends when it has had its share of forks and the last one is released."""

    def __init__(self, service: tinker.ServiceClient, sessions: _Sessions) -> None:
        self.service, self._sessions = service, sessions
        self.opened = self.live = 0

    def release(self, *, cancelled: bool = False) -> None:
        """Release a fork. After a cancelled one, the session takes no further forks, so that it ends soon."""
        self.live -= 1
        self._sessions.released(self, cancelled)


class _Sessions:
    """The sessions of forks."""

    def __init__(self, policy: TinkerTrainer, size: int) -> None:
        self._address, self._size = policy.address, size
        self._current: _Session | None = None
        self._opening = asyncio.Lock()
        self._open: set[_Session] = set()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def live(self) -> int:
        """Number of forks that are not released."""
        return sum(session.live for session in self._open)

    async def fork(self, path: str, inherit: bool, ttl_seconds: int) -> TinkerFork:
        """Open a fork from saved weights."""
        session = await self._next()
        create = session.service.create_training_client_from_state
        if inherit:
            create = session.service.create_training_client_from_state_with_optimizer
        try:
            async with translate_errors("copying the policy for a shadow step"):
                client = await create(path, user_metadata={"role": "shadow", "ttl": str(ttl_seconds)})
        except BaseException:
            session.release(cancelled=True)
            raise
        return TinkerFork(client, session)

    async def _next(self) -> _Session:
        """The session of the next fork, which counts as opened."""
        async with self._opening:
            if self._current is None:
                base_url, api_key = self._address
                async with translate_errors("opening a session for shadow steps"):
                    service = await asyncio.to_thread(tinker.ServiceClient, base_url=base_url, api_key=api_key)
                self._current = _Session(service, self)
                self._open.add(self._current)
            session = self._current
            session.opened, session.live = session.opened + 1, session.live + 1
            if session.opened >= self._size:
                self._current = None
            return session

    def released(self, session: _Session, cancelled: bool) -> None:
        """End a session that is complete and has no live fork."""
        if cancelled and session is self._current:
            self._current = None
        if session is not self._current and not session.live:
            self._end(session)

    def _end(self, session: _Session) -> None:
        self._open.discard(session)
        task = asyncio.create_task(end_session(session.service, "success"))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all sessions."""
        self._current = None
        for session in tuple(self._open):
            self._end(session)
        await asyncio.gather(*self._ending)


async def _path(saving: Awaitable[tinker.types.SaveWeightsResponse]) -> str:
    async with translate_errors("saving weights for shadow steps"):
        return (await saving).path


def _adam(params: StepParams) -> tinker.AdamParams:
    return tinker.AdamParams(
        learning_rate=params.adam_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.adam_eps,
        weight_decay=0.0,
        grad_clip_norm=0.0,
    )


def text_datum(text: ShadowText, **numbers: int) -> tinker.Datum:
    """The text as a Datum of the SDK, with further inputs of one number each."""
    arrays = {
        "target_tokens": np.array(text.tokens[1:], np.int64),
        "weights": np.array(text.weights, np.float32),
        **{name: np.array([number], np.int64) for name, number in numbers.items()},
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(text.tokens[:-1])),
        loss_fn_inputs=cast(Any, {name: tinker.TensorData.from_numpy(values) for name, values in arrays.items()}),
    )


def _logprobs(result: Any) -> list[np.ndarray]:
    return [np.asarray(outputs["logprobs"].to_numpy(), np.float32) for outputs in result.loss_fn_outputs]


def _effect(probe: ShadowText, outputs: dict[str, np.ndarray]) -> ProbeDelta:
    measured = {name: values for name, values in outputs.items() if values.size}  # the SDK adds empty ones
    pre, post = (
        probe.value(measured[name]) if name in measured else None for name in ("logprobs_pre", "logprobs_post")
    )
    return ProbeDelta.of(probe, float(outputs["delta"].reshape(-1)[0]), pre, post)
