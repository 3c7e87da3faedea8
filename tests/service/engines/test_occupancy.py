"""Occupancy: who was alone in an engine, and a reservation."""

from __future__ import annotations

import asyncio

from tinsmith.service.engines.occupancy import Occupancy


def test_only_a_stay_without_company_is_alone() -> None:
    async def main() -> None:
        occupancy = Occupancy()
        async with occupancy.share() as first:
            assert first.alone
            async with occupancy.share() as second:
                assert not second.alone
            assert not first.alone, "company that has left counts too"
        async with occupancy.share() as third:
            assert third.alone

    asyncio.run(main())


def test_reservation_waits_for_all_and_all_wait_for_it() -> None:
    """Fails without the wait for `_empty` in `reserve`, or for `_open` in `share`."""

    async def main() -> None:
        occupancy, order = Occupancy(), []
        leave = asyncio.Event()

        async def stay(name: str, *, reserved: bool = False) -> None:
            async with occupancy.reserve() if reserved else occupancy.share():
                order.append(f"{name} in")
                if name == "first":
                    await leave.wait()
                await asyncio.sleep(0)
                order.append(f"{name} out")

        names = [("first", False), ("alone", True), ("also alone", True), ("last", False)]
        tasks = []
        for name, reserved in names:
            tasks.append(asyncio.create_task(stay(name, reserved=reserved)))
            await asyncio.sleep(0)
        cancelled = asyncio.create_task(stay("cancelled", reserved=True))
        await asyncio.sleep(0.01)
        assert order == ["first in"]
        cancelled.cancel()
        leave.set()
        await asyncio.gather(*tasks)
        ends = [order[at : at + 2] for at in range(0, len(order), 2)]
        assert sorted(ends) == sorted([f"{name} in", f"{name} out"] for name, _ in names)

    asyncio.run(main())
