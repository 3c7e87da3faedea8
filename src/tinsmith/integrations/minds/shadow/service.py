"""ShadowService: the shadow steps of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from typing_extensions import override

from tinsmith.errors import ConfigError, UserError
from tinsmith.integrations.minds.shadow.config import Rung, ShadowConfig
from tinsmith.integrations.minds.shadow.records import ShadowDelta, ShadowGroup, ShadowServer, ShadowText
from tinsmith.integrations.minds.shadow.rungs import ForkRung, ReverseRung, ShadowRung
from tinsmith.integrations.minds.shadow.virtual import VirtualRung
from tinsmith.rl.rollouts.resources import Resource


class ShadowService(Resource):
    """Measures what a step on some texts would change. There is one in a run; it owns forks, caches and limits.

    Example: (await shadow.delta(train=[reply], probes=[capital], at=policy.version)).probes[0].delta
    """

    def __init__(self, config: ShadowConfig, server: ShadowServer) -> None:
        """Raises ConfigError if the server cannot take the steps that the settings ask for."""
        self._config, self._server = config, server
        self._rung = _rung(config, server)
        self._newest = server.version
        self._count = self._errors = 0
        self._seconds = 0.0

    @property
    def rung(self) -> Rung:
        """How the steps are taken."""
        return self._rung.name

    async def delta(
        self, *, train: Sequence[ShadowText], probes: Sequence[ShadowText], at: int | None = None
    ) -> ShadowDelta:
        """By how much one step on `train` changes the logprobs of each probe.

        The step starts from the weights of version `at`, or the newest. Raises TinsmithError if it cannot be measured:
        the rollout then fails, and is not scored.
        """
        group = ShadowGroup(train=tuple(train), probes=tuple(probes))
        if not group.train or not group.probes:
            raise UserError("A shadow step needs at least one text to train on and one probe.", "Pass both.")
        version = self._server.version if at is None else at
        self._drop_old()
        begin, mode = time.perf_counter(), self._rung.mode
        try:
            effects = await self._rung.measure(group, version)
        except Exception:
            self._errors += 1
            raise
        self._count += 1
        self._seconds += time.perf_counter() - begin
        return ShadowDelta(probes=effects, version=version, rung=self.rung, optimizer=self._config.optimizer, mode=mode)

    @override
    def metrics(self) -> dict[str, float]:
        """Numbers of the steps since the previous call; empty if there were none."""
        count, errors, seconds = self._count, self._errors, self._seconds
        self._count, self._errors, self._seconds = 0, 0, 0.0
        if not count and not errors:
            return {}
        return {
            "shadow/count": count,
            "shadow/errors": errors,
            "shadow/seconds": seconds / max(1, count),
            "shadow/live_forks": self._server.live_forks,
            **self._rung.metrics(),
        }

    @override
    async def close(self) -> None:
        """Free all forks. No rollout may be in progress."""
        self._rung.drop(self._server.version + 1)
        await self._server.close()

    def _drop_old(self) -> None:
        if self._server.version > self._newest:
            self._newest = self._server.version
            self._rung.drop(self._server.oldest)


def _rung(config: ShadowConfig, server: ShadowServer) -> ShadowRung:
    method = config.method
    if method == "auto":
        plain = "reverse" if config.optimizer == "sgd" else "fork"
        method = "virtual" if server.steps_virtually else plain
    if method == "virtual":
        if not server.steps_virtually:
            raise ConfigError(
                "shadow.method: this server has no virtual shadow steps (loss_fn shadow).",
                "Set it to auto, fork or reverse.",
            )
        return VirtualRung(server, config)
    if config.mode == "first_order":
        raise ConfigError(
            f"shadow.mode: first_order needs virtual steps, and this server takes steps by {method}.",
            "Leave out shadow.mode.",
        )
    return ForkRung(server, config) if method == "fork" else ReverseRung(server, config)
