"""Start a service on what a power cut has left, and compare with what had been acknowledged before."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.power.disk import Disk, Losses
from tests.faults.power.session import Acknowledgement, Recording, folder_of
from tests.faults.reference import digest
from tests.service.support.inprocess import Api, Factory
from tests.service.support.inprocess import api as running

LOSSES: tuple[Losses, ...] = ("unsynced", "some", "nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A power cut after a number of operations."""

    after: int
    losses: Losses
    seed: int


def cuts(recording: Recording, count: int, seed: int) -> Iterator[Cut]:
    """Cuts at random places of a recording, in order. Cuts before the first acknowledgement promise nothing."""
    first = _operations_before(recording, recording.acknowledged[0].at)
    places = range(first, len(recording.operations) + 1)
    rng = random.Random(seed)
    chosen = sorted(rng.sample(places, min(count, len(places))))
    for number, after in enumerate(chosen):
        yield Cut(after=after, losses=LOSSES[number % 2] if number % 5 else "nothing", seed=rng.randrange(10**6))


def violations(recording: Recording, planned: Sequence[Cut], folder: Path) -> Iterable[str]:
    """What was acknowledged before one of the cuts, and is not there after it."""
    disk, applied = Disk(), 0
    for number, cut in enumerate(planned):
        disk.apply(recording.operations[applied : cut.after])
        applied = cut.after
        data = folder / f"cut-{number}"
        disk.cut(data, cut.losses, random.Random(cut.seed))
        at = recording.operations[cut.after].at if cut.after < len(recording.operations) else float("inf")
        acknowledged = [entry for entry in recording.acknowledged if entry.at <= at]
        for violation in asyncio.run(_check(data, acknowledged)):
            yield f"{cut}: {violation}"


async def _check(data: Path, acknowledged: Sequence[Acknowledgement]) -> list[str]:
    key = next(entry.key for entry in acknowledged if entry.kind == "key")
    try:
        async with running(data, Factory(), api_key=None, database=None) as app:
            app = Api(app.http, app.service, key)
            lost = [text async for text in _lost(app, data, acknowledged)]
    except Exception as error:  # noqa: BLE001 - a service that does not start has lost everything
        return [f"the service does not start or answer: {type(error).__name__}: {error}"]
    return lost


async def _lost(app: Api, data: Path, acknowledged: Sequence[Acknowledgement]) -> AsyncIterator[str]:
    kinds = ("deleting", "deleted", "ending", "end")
    keys = {kind: {entry.key for entry in acknowledged if entry.kind == kind} for kind in kinds}
    if (data / "api-key").read_text().strip() != next(entry.key for entry in acknowledged if entry.kind == "key"):
        yield "the server has another key"
    for entry in acknowledged:
        if entry.kind == "end" or (entry.kind == "session" and entry.key not in keys["ending"]):
            is_alive = not (await app.post("session_heartbeat", {"session_id": entry.key})).is_error
            if is_alive is (entry.kind == "end"):
                yield f"session {entry.key} is {'alive again' if is_alive else 'lost'}"
        elif entry.kind in ("promise", "result") and (answer := await _unequal_result(app, entry)) is not None:
            yield f"the {entry.kind} of {entry.key} is {answer!r}"
        elif entry.kind == "checkpoint" and entry.key not in keys["deleting"]:
            if digest(folder_of(data, entry.key)) != entry.value:
                yield f"checkpoint {entry.key} has other bytes"
        elif entry.kind == "sampler" and (answer := await _score(app, entry.key)) != entry.value:
            yield f"sampling session {entry.key} answers {answer[:200]!r}"
    for path in keys["deleted"] & await _listed(app):
        yield f"deleted checkpoint {path} is there again"


async def _unequal_result(app: Api, entry: Acknowledgement) -> bytes | None:
    """The answer to a poll, unless it is the one from before the power cut."""
    answer = await app.result({"request_id": entry.key})
    is_equal = answer.status_code == 200 and entry.value in (None, answer.content)
    return None if is_equal else b"%d " % answer.status_code + answer.content[:200]


async def _listed(app: Api) -> set[str]:
    answer = await app.send("GET", "/api/v1/checkpoints?limit=1000", b"")
    return {entry["tinker_path"] for entry in answer.json()["checkpoints"]}


async def _score(app: Api, sampler: str) -> bytes:
    body = {
        "sampling_session_id": sampler,
        "seq_id": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, 8]}]},
        "sampling_params": {"max_tokens": 1, "seed": 3},
        "prompt_logprobs": True,
    }
    promise = (await app.post("asample", body)).json()
    return (await app.result(promise)).content if "request_id" in promise else str(promise).encode()


def _operations_before(recording: Recording, at: float) -> int:
    return sum(operation.at < at for operation in recording.operations)
