"""Virtual shadow steps: the steps of concurrent rollouts in one call, and an audit of first-order results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from tinsmith.errors import TinsmithError, UserError
from tinsmith.integrations.minds.shadow.config import Mode, ShadowConfig
from tinsmith.integrations.minds.shadow.records import ProbeDelta, ShadowGroup, ShadowServer
from tinsmith.integrations.minds.shadow.rungs import ShadowRung

MAX_TEXTS = 512
"""Texts of one call. The SDK splits calls at 1024 texts and 5 MB, and a group must not be split."""
MAX_TOKENS = 100_000
"""Tokens of one call, which are at most 24 bytes each."""
AUDIT_PAIRS = 8
"""Least number of audited effects before the mode may change."""
AUDIT_CORRELATION = 0.99
"""Least correlation of first-order and exact effects."""
_AUDIT_WINDOW = 256

log = logging.getLogger(__name__)

Effects = tuple[ProbeDelta, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    group: ShadowGroup
    version: int
    mode: Mode
    result: asyncio.Future[Effects]


class VirtualRung(ShadowRung):
    """Gathers the steps that rollouts wait for, and sends those of one version together."""

    def __init__(self, server: ShadowServer, config: ShadowConfig) -> None:
        self.name, self.mode = "virtual", config.mode
        self._server, self._params, self._wait = server, config.params, config.gather_seconds
        self._pending: list[_Request] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._audit = Audit(config.audit) if config.mode == "first_order" and config.audit else None
        self._calls = 0

    @override
    async def measure(self, group: ShadowGroup, version: int) -> Effects:
        if self.mode == "exact" or self._audit is None or not self._audit.next():
            return await self._request(group, version, self.mode)
        approximate, exact = await asyncio.gather(
            self._request(group, version, "first_order"), self._request(group, version, "exact")
        )
        self._audit.add(approximate, exact)
        if self._audit.failed and self.mode == "first_order":
            log.warning(
                "First-order shadow steps correlate with exact ones by %.4f only: the run continues with exact steps. "
                "A smaller shadow.learning_rate makes first_order accurate.",
                self._audit.correlation,
            )
            self.mode = "exact"
        return approximate

    @override
    def metrics(self) -> dict[str, float]:
        calls, self._calls = self._calls, 0
        audited = self._audit.metrics() if self._audit else {}
        return {"shadow/calls": calls, "shadow/exact": float(self.mode == "exact"), **audited}

    @override
    def drop(self, before: int) -> None:
        pass

    async def _request(self, group: ShadowGroup, version: int, mode: Mode) -> Effects:
        request = _Request(group, version, mode, asyncio.get_running_loop().create_future())
        self._pending.append(request)
        if len(self._pending) == 1:
            task = asyncio.create_task(self._send_soon())
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        return await request.result

    async def _send_soon(self) -> None:
        await asyncio.sleep(self._wait)
        pending, self._pending = [each for each in self._pending if not each.result.done()], []
        await asyncio.gather(*(self._send(batch) for batch in batches(pending)))

    async def _send(self, batch: Sequence[_Request]) -> None:
        """Answer the requests of a batch. If the server rejects it, each is sent alone: only the wrong ones fail."""
        self._calls += 1
        try:
            effects = await self._server.virtual(
                [each.group for each in batch], batch[0].version, self._params, batch[0].mode
            )
        except UserError as error:
            if len(batch) > 1:
                await asyncio.gather(*(self._send([each]) for each in batch))
            else:
                _fail(batch, error)
        except Exception as error:  # noqa: BLE001  the rollouts that wait get the error
            _fail(batch, error)
        else:
            for each, values in zip(batch, effects, strict=True):
                if not each.result.done():  # a cancelled rollout
                    each.result.set_result(values)


def _fail(batch: Iterable[_Request], error: Exception) -> None:
    for each in batch:
        if not each.result.done():
            each.result.set_exception(error if isinstance(error, TinsmithError) else TinsmithError(str(error)))


def batches(requests: Sequence[_Request]) -> list[list[_Request]]:
    """The requests in calls: each of one version and mode, with whole groups, within the limits of a call."""
    calls: dict[tuple[int, Mode], list[list[_Request]]] = {}
    sizes: dict[tuple[int, Mode], tuple[int, int]] = {}
    for request in requests:
        key = (request.version, request.mode)
        texts = (*request.group.train, *request.group.probes)
        count, tokens = len(texts), sum(len(text.tokens) for text in texts)
        before = sizes.get(key, (0, 0))
        fits = before[0] + count <= MAX_TEXTS and before[1] + tokens <= MAX_TOKENS
        if key not in calls or not fits:
            calls.setdefault(key, []).append([])
            before = (0, 0)
        calls[key][-1].append(request)
        sizes[key] = (before[0] + count, before[1] + tokens)
    return [batch for of_key in calls.values() for batch in of_key]


class Audit:
    """Compares a share of first-order effects with exact ones."""

    def __init__(self, share: float) -> None:
        self._share, self._count = share, 0
        self._pairs: list[tuple[float, float]] = []

    def next(self) -> bool:
        """Count a result; returns whether to measure it exactly too. The first one is."""
        self._count += 1
        return self._count == 1 or int(self._count * self._share) > int((self._count - 1) * self._share)

    def add(self, approximate: Effects, exact: Effects) -> None:
        """Add the effects of one step."""
        self._pairs += [(first.delta, second.delta) for first, second in zip(approximate, exact, strict=True)]
        del self._pairs[:-_AUDIT_WINDOW]

    @property
    def correlation(self) -> float:
        """Pearson correlation of the pairs; 1 if there are fewer than two or all are equal."""
        pairs = np.array(self._pairs)
        if len(pairs) < 2 or np.ptp(pairs[:, 0] - pairs[:, 1]) == 0:
            return 1.0
        if 0 in np.ptp(pairs, axis=0):
            return 0.0
        return float(np.corrcoef(pairs.T)[0, 1])

    @property
    def failed(self) -> bool:
        """Whether enough pairs show that first-order effects are wrong."""
        return len(self._pairs) >= AUDIT_PAIRS and self.correlation < AUDIT_CORRELATION

    def metrics(self) -> dict[str, float]:
        """Correlation and mean absolute error, once there are pairs."""
        if not self._pairs:
            return {}
        pairs = np.array(self._pairs)
        error = float(np.abs(pairs[:, 0] - pairs[:, 1]).mean())
        return {"shadow/audit_corr": self.correlation, "shadow/audit_mae": error}
