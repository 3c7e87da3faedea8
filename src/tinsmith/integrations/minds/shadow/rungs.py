"""How shadow steps are taken: on forks of the policy, on forks in reverse, or virtually."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from typing_extensions import override

from tinsmith.integrations.minds.shadow.config import Mode, Rung, ShadowConfig
from tinsmith.integrations.minds.shadow.records import Fork, ProbeDelta, ShadowGroup, ShadowServer, ShadowText


class ShadowRung(Protocol):
    """A way to take shadow steps."""

    name: Rung
    """Name of the rung."""
    mode: Mode
    """Whether results are exact or first-order approximations."""

    async def measure(self, group: ShadowGroup, version: int) -> tuple[ProbeDelta, ...]:
        """The effects of a step from the weights of `version` on the probes of the group."""
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers since the previous call."""
        ...

    def drop(self, before: int) -> None:
        """Forget what belongs to versions before this one."""
        ...


class _CachingRung(ShadowRung):
    """Keeps results of a version, and counts how often one was used again."""

    def __init__(self, server: ShadowServer, config: ShadowConfig) -> None:
        self._server, self._params = server, config.params
        self._cached = 0

    @override
    def metrics(self) -> dict[str, float]:
        cached, self._cached = self._cached, 0
        return {"shadow/cached": cached}


class ForkRung(_CachingRung):
    """Each step on a fork of its own. Logprobs before the step are computed once for each version."""

    def __init__(self, server: ShadowServer, config: ShadowConfig) -> None:
        super().__init__(server, config)
        self.name, self.mode = "fork", "exact"
        self._places = asyncio.Semaphore(config.live_forks)
        self._before: dict[tuple[int, tuple[ShadowText, ...]], list[np.ndarray]] = {}

    @override
    async def measure(self, group: ShadowGroup, version: int) -> tuple[ProbeDelta, ...]:
        key = (version, group.probes)
        async with self._places:
            before = self._before.get(key)
            fork = await self._server.fork(version, inherit=self._params.optimizer == "adam_inherit")
            try:
                measured, after = await fork.step(group, self._params, before=before is None)
            finally:
                fork.release()
        self._cached += before is not None
        # The first result stays, so that all results of a version compare with the same numbers.
        before = before or self._before.setdefault(key, measured)
        return tuple(_measured(*values) for values in zip(group.probes, before, after, strict=True))

    @override
    def drop(self, before: int) -> None:
        self._before = {key: value for key, value in self._before.items() if key[0] >= before}


class ReverseRung(_CachingRung):
    """One fork for each probe and version, which takes an SGD step on the probe.

    To first order, a step on x changes the logprob of p by learning_rate * <g_x, g_p>, which is symmetric: a step on p
    changes the logprob of x by the same amount. So each result is a forward pass of its train texts on the forks.
    """

    def __init__(self, server: ShadowServer, config: ShadowConfig) -> None:
        super().__init__(server, config)
        self.name, self.mode = "reverse", "first_order"
        self._forks: dict[tuple[int, ShadowText | None], asyncio.Task[Fork]] = {}
        """Forks by version and probe; None: without a step, for logprobs before."""

    @override
    async def measure(self, group: ShadowGroup, version: int) -> tuple[ProbeDelta, ...]:
        forks = await asyncio.gather(*(self._fork(version, probe) for probe in (None, *group.probes)))
        passes = await asyncio.gather(*(fork.logprobs(group.train) for fork in forks), return_exceptions=True)
        before, *after = [_raised(values) for values in passes]
        return tuple(
            ProbeDelta.of(probe, _total(group.train, values) - _total(group.train, before))
            for probe, values in zip(group.probes, after, strict=True)
        )

    async def _fork(self, version: int, probe: ShadowText | None) -> Fork:
        key = (version, probe)
        if key not in self._forks:
            self._forks[key] = asyncio.create_task(self._stepped(version, probe))
        else:
            self._cached += probe is not None
        try:
            return await asyncio.shield(self._forks[key])  # other rollouts wait for the fork too
        except Exception:
            self._forks.pop(key, None)  # the next rollout opens another
            raise

    async def _stepped(self, version: int, probe: ShadowText | None) -> Fork:
        fork = await self._server.fork(version, inherit=False)
        if probe is not None:
            try:
                await fork.step(ShadowGroup(train=(probe,), probes=()), self._params, before=False)
            except BaseException:
                fork.release()
                raise
        return fork

    @override
    def drop(self, before: int) -> None:
        for key in [key for key in self._forks if key[0] < before]:
            task = self._forks.pop(key)
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().release()
            else:
                task.cancel()


def _measured(probe: ShadowText, before: np.ndarray, after: np.ndarray) -> ProbeDelta:
    pre, post = probe.value(before), probe.value(after)
    change = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    return ProbeDelta.of(probe, probe.value(change), pre, post)


def _total(texts: Sequence[ShadowText], logprobs: Sequence[np.ndarray]) -> float:
    return sum(text.value(values) for text, values in zip(texts, logprobs, strict=True))


def _raised(values: list[np.ndarray] | BaseException) -> list[np.ndarray]:
    if isinstance(values, BaseException):
        raise values
    return values
