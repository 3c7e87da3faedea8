"""The checks of `tinsmith doctor --cluster`: machines, versions, object store, folder and network of a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

from tinsmith.cli.doctor import GIB, Finding
from tinsmith.engine.adapters.access import check_folder, check_store, without_sight
from tinsmith.errors import TinsmithError
from tinsmith.plurals import counted
from tinsmith.service.config import ServeConfig
from tinsmith.service.engines.clusters import connect_slots

ROOM_S = 60.0
"""Time to get a free core of each machine."""
SAMPLE_BYTES = 64 << 20
"""Bytes sent between two machines to measure the network."""
SLOW_BYTES_S = 1e9
"""An exchange of the gradients of a 4B model's adapter (264 MB) takes half a second at this."""


def run_cluster_checks(config: ServeConfig) -> list[Finding]:
    """Run the checks in order; those after one that fails need it, and are left out."""
    return asyncio.run(_collect(config))


async def _collect(config: ServeConfig) -> list[Finding]:
    findings = []
    try:
        async for finding in _checks(config):
            findings.append(finding)
    except TinsmithError as error:
        findings.append(Finding("fail", "cluster", error.message, error.hint))
    except TimeoutError:
        findings.append(
            Finding(
                "warn", "slots", f"no free core on each machine within {ROOM_S:g} s", "`ray status` says who has them."
            )
        )
    return findings


async def _checks(config: ServeConfig) -> AsyncIterator[Finding]:
    cluster, data = config.cluster, config.data
    ray_slots = await connect_slots(cluster)  # which says what to do without Ray
    from tinsmith.engine.processes.ray_slots import RaySlots

    assert isinstance(ray_slots, RaySlots)
    yield Finding("ok", "cluster", f"{cluster.address}, with token authentication")
    try:
        for machine in await ray_slots.machines():
            kind = f", {len(machine.gpus)} x {machine.gpus[0]}" if machine.gpus else ""
            size = f"{counted(machine.cpus, 'core')} for processes, {machine.memory_bytes / GIB:.0f} GiB{kind}"
            yield Finding("ok", "machine", f"{machine.name} at {machine.host}: {size}")
        async with asyncio.timeout(ROOM_S):
            slots = await ray_slots.reserve_on_each()
        if not slots:
            yield Finding("fail", "slots", "no machine has cores for processes", "ray start without --num-cpus 0")
            return
        installed = ", ".join(f"{name} {version}" for name, version in slots[0].location.machine.versions.items())
        yield Finding("ok", "versions", f"the same on {counted(len(slots), 'machine')}: {installed}")
        data.mkdir(parents=True, exist_ok=True)
        if config.store is None:
            await check_folder(slots, data)
        else:
            await check_store(slots, config.store)
            yield Finding("ok", "store", f"all machines write and read {config.store}")
        blind = await without_sight(slots, data)
        through = f"{blind} does not see {data}: adapters go through the store"
        yield Finding("ok", "folder", through if blind else f"all machines see {data}")
        for first, second in pairwise(slots):
            rate = await first.bandwidth(second, SAMPLE_BYTES)
            text = f"{first.machine} to {second.machine}: {rate / 1e9:.1f} GB/s"
            slow = "Training processes exchange gradients slowly: keep them on one machine."
            yield Finding("warn", "network", text, slow) if rate < SLOW_BYTES_S else Finding("ok", "network", text)
    finally:
        await ray_slots.close()
