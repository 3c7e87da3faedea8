"""ShadowService with a scripted server: rungs, batches, limits, audit and metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from tests.integrations.minds.shadow.scripted_server import ScriptedShadowServer, text
from tinsmith.errors import ConfigError, TinsmithError, UserError
from tinsmith.integrations.minds.shadow.config import ShadowConfig
from tinsmith.integrations.minds.shadow.records import ProbeDelta, ShadowText
from tinsmith.integrations.minds.shadow.service import ShadowService
from tinsmith.integrations.minds.shadow.virtual import MAX_TEXTS, Audit

PROBE = text(7, 8, 9)


def service(server: ScriptedShadowServer, **settings: Any) -> ShadowService:
    return ShadowService(ShadowConfig.model_validate(settings), server)


async def deltas(shadow: ShadowService, *firsts: int, at: int | None = None) -> list[Any]:
    """Effects of steps on texts that begin with these tokens, all at once; errors in their place."""
    steps = (shadow.delta(train=[text(first, 1)], probes=[PROBE], at=at) for first in firsts)
    results = await asyncio.gather(*steps, return_exceptions=True)
    return [result if isinstance(result, BaseException) else result.probes[0].delta for result in results]


@pytest.mark.parametrize(
    ("virtual", "optimizer", "rung"),
    [
        (True, "sgd", "virtual"),
        (False, "sgd", "reverse"),
        (False, "adam_fresh", "fork"),
        (True, "adam_fresh", "virtual"),
    ],
)
def test_auto_chooses_by_server_and_optimizer(virtual, optimizer, rung):
    assert service(ScriptedShadowServer(virtual=virtual), optimizer=optimizer).rung == rung


def test_unsupported_methods_are_refused_by_name():
    with pytest.raises(ConfigError, match="no virtual shadow steps"):
        service(ScriptedShadowServer(virtual=False), method="virtual")
    with pytest.raises(ConfigError, match="first_order needs virtual steps"):
        service(ScriptedShadowServer(virtual=False), mode="first_order")
    with pytest.raises(ValidationError, match="method reverse takes sgd steps, not adam_fresh"):
        ShadowConfig(method="reverse", optimizer="adam_fresh")
    with pytest.raises(ValidationError, match="mode is not used with method: fork"):
        ShadowConfig(method="fork", mode="first_order")
    with pytest.raises(ValidationError, match="beta1 is not used with optimizer: sgd"):
        ShadowConfig(beta1=0.5)


def test_texts_without_weights_are_refused():
    with pytest.raises(ValueError, match="3 tokens with 1 weight"):
        ShadowText(tokens=(1, 2, 3), weights=(1.0,))
    with pytest.raises(ValueError, match="every weight"):
        ShadowText(tokens=(1, 2), weights=(0.0,))
    with pytest.raises(UserError, match="at least one text"):
        asyncio.run(service(ScriptedShadowServer()).delta(train=[], probes=[PROBE]))


def test_concurrent_virtual_steps_are_one_call():
    server = ScriptedShadowServer()
    shadow = service(server)
    assert asyncio.run(deltas(shadow, 3, 4, 5)) == [3.0, 4.0, 5.0]
    assert server.calls == [(3, 0, "exact")]
    metrics = shadow.metrics()
    assert (metrics["shadow/count"], metrics["shadow/calls"], metrics["shadow/errors"]) == (3, 1, 0)
    assert shadow.metrics() == {}


def test_groups_are_not_split_between_calls():
    server = ScriptedShadowServer()
    probes = [text(7, first) for first in range(MAX_TEXTS // 3)]

    async def main():
        shadow = service(server)
        return await asyncio.gather(*(shadow.delta(train=[text(first, 1)], probes=probes) for first in range(1, 6)))

    results = asyncio.run(main())
    assert [result.probes[0].delta for result in results] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [len(result.probes) for result in results] == [len(probes)] * 5
    assert [count for count, _, _ in server.calls] == [2, 2, 1]


def test_versions_are_in_calls_of_their_own():
    server = ScriptedShadowServer()
    server.newest = 1

    async def main():
        shadow = service(server)
        return await asyncio.gather(deltas(shadow, 3, at=0), deltas(shadow, 4, 5))

    asyncio.run(main())
    assert sorted(server.calls) == [(1, 0, "exact"), (2, 1, "exact")]


def test_rejected_step_does_not_fail_its_siblings():
    server = ScriptedShadowServer()
    server.rejects = lambda group: UserError("token out of range") if group.train[0].tokens[0] == 4 else None
    shadow = service(server)
    first, second, third = asyncio.run(deltas(shadow, 3, 4, 5))
    assert (first, third) == (3.0, 5.0)
    assert isinstance(second, UserError)
    assert shadow.metrics()["shadow/errors"] == 1


def test_failing_server_fails_every_step():
    server = ScriptedShadowServer()
    server.rejects = lambda _: TinsmithError("out of memory")
    shadow = service(server)
    assert all(isinstance(result, TinsmithError) for result in asyncio.run(deltas(shadow, 3, 4)))
    assert shadow.metrics()["shadow/errors"] == 2
    assert len(server.calls) == 1


def test_cancelled_virtual_step_is_not_sent():
    server = ScriptedShadowServer()

    async def main():
        shadow = service(server)
        cancelled = asyncio.create_task(deltas(shadow, 3))
        other = asyncio.create_task(deltas(shadow, 4))
        await asyncio.sleep(0)
        cancelled.cancel()
        return await other

    assert asyncio.run(main()) == [4.0]
    assert server.calls == [(1, 0, "exact")]


def test_first_order_steps_are_audited():
    server = ScriptedShadowServer(error=lambda delta: 0.001 * delta)

    async def main():
        shadow = service(server, mode="first_order", audit=0.5)
        for first in range(1, 21):
            await deltas(shadow, first)
        return shadow.metrics()

    metrics = asyncio.run(main())
    assert sum(mode == "exact" for _, _, mode in server.calls) == 11  # the first and every second one
    assert metrics["shadow/audit_corr"] > 0.999
    audited = [1, *range(2, 21, 2)]
    assert metrics["shadow/audit_mae"] == pytest.approx(0.001 * sum(audited) / len(audited))
    assert metrics["shadow/exact"] == 0


def test_wrong_first_order_steps_become_exact(caplog):
    server = ScriptedShadowServer(error=lambda delta: 8.0 * (-1) ** int(delta))

    async def main():
        shadow = service(server, mode="first_order", audit=1.0)
        for first in range(1, 12):
            result = await shadow.delta(train=[text(first, 1)], probes=[PROBE])
        return result, shadow.metrics()

    result, metrics = asyncio.run(main())
    assert (result.mode, result.probes[0].delta, metrics["shadow/exact"]) == ("exact", 11.0, 1)
    assert "continues with exact steps" in caplog.text
    assert server.calls[-1] == (1, 0, "exact")


def test_correlation_of_constant_effects():
    effects = (service_effect(2.0),)
    audit = Audit(1.0)
    for _ in range(10):
        audit.add(effects, effects)
    assert not audit.failed
    audit.add((service_effect(3.0),), effects)
    assert audit.failed  # the exact effects do not vary with the approximate ones


def service_effect(delta: float) -> ProbeDelta:
    return ProbeDelta.of(PROBE, delta)


def test_forks_are_limited_and_released():
    server = ScriptedShadowServer(virtual=False)
    shadow = service(server, method="fork", live_forks=2)
    results = asyncio.run(deltas(shadow, 1, 2, 3, 4, 5))
    assert results == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.10])  # two tokens of a probe, a hundredth each
    assert (server.most_live, server.live) == (2, 0)


def test_reverse_forks_once_for_each_probe_and_version():
    server = ScriptedShadowServer(virtual=False)

    async def main():
        shadow = service(server, method="reverse")
        first = await deltas(shadow, 1, 2, 3)
        server.newest = 2  # versions 0 and before are gone
        await deltas(shadow, 1)
        live = server.live
        await shadow.close()
        return first, live

    first, live = asyncio.run(main())
    assert first == pytest.approx([0.07] * 3)  # the step on the probe shifts the text's one target
    assert server.forks == [(0, False), (0, False), (2, False), (2, False)]
    assert (live, server.live) == (2, 0)
