"""What the address and the machines of a Ray cluster must be like. Imports no Ray."""

from __future__ import annotations

import asyncio
import os

from tinsmith.engine.processes.machine import versions
from tinsmith.engine.processes.node_agent import SlotLocation
from tinsmith.errors import ConfigError

REACH_HEAD_S = 10.0
"""Time to connect to the port of a cluster's head, which may be starting again."""
RETRY_S = 0.5
_TOKEN_HINT = (
    "On every machine set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to one secret, before `ray start` and before "
    "`tinsmith serve`."
)


async def check_address(address: str) -> None:
    """Raises ConfigError for an address that cannot be used or where nothing listens, and if this process has no token
    for a cluster."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"cluster.address {address} is one of Ray's client, which is not supported.",
            "Give HOST:PORT of the cluster's head, or `auto` on a machine of the cluster.",
        )
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            "Ray listens on all interfaces, and without a token whoever reaches it can run programs.", _TOKEN_HINT
        )
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        await _check_listens(host, int(port))


def check_locations(locations: list[SlotLocation]) -> None:
    """Raises ConfigError if machines differ in what must be equal, or accept callers without a token."""
    own, first = versions(), locations[0].machine.versions
    for location in locations:
        machine = location.machine
        if not location.requires_token:
            raise ConfigError(f"Ray on {machine.name} accepts callers without a token.", _TOKEN_HINT)
        for package, version in {**own, "torch": first.get("torch", "")}.items():
            if package != "transformers" and machine.versions.get(package, "") != version:
                raise ConfigError(
                    f"{machine.name} has {package} {machine.versions.get(package) or 'missing'}, the others {version}.",
                    "Install the same versions on all machines.",
                )
    kinds = {kind for location in locations if location.gpus for kind in location.machine.gpus}
    if len(kinds) > 1:
        raise ConfigError(
            f"The machines have GPUs of different kinds ({', '.join(sorted(kinds))}), which round differently.",
            "Use machines of one kind.",
        )


async def _check_listens(host: str, port: int) -> None:
    """Raises ConfigError if nothing accepts connections there; Ray would try for minutes."""
    reason = "it does not answer"
    try:
        async with asyncio.timeout(REACH_HEAD_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, port)
                    writer.close()
                    return
                except OSError as error:
                    reason = error.strerror or str(error)
                await asyncio.sleep(RETRY_S)
    except TimeoutError as error:
        raise ConfigError(
            f"There is no Ray cluster at {host}:{port}: {reason}.",
            "Start one with `ray start --head`; HOST:PORT is what it prints, and `auto` the cluster of this machine.",
        ) from error
