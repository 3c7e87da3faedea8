"""What must hold after a run of faults, beside what the tenants compare while it runs.

Each function returns the violations that it has seen, as sentences.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from sqlalchemy import func, select

from tests.faults.clients import Tenant
from tests.faults.reference import digest
from tests.service.support.databases import beside
from tinsmith.engine.adapters.store import Manifest, MissingObjectError, ObjectStore
from tinsmith.service.storage.tables import CHECKPOINTS, OBJECTS, REQUESTS

TIDY_S = 100.0
"""Longest time from the end of the last session until nothing of it is left: the service looks once a minute."""
GROWTH_BYTES = 48 << 20
"""Memory that the API process may keep after hundreds of requests, above what it took when it was ready."""
TEMPORARY = re.compile(r"\.(part|new|writing|replaced|plain)$")


def lost_checkpoints(tenants: Sequence[Tenant], data: Path, store: str | None = None) -> Iterable[str]:
    """Checkpoints whose saves were answered, and that are missing or hold other bytes, here or in the store."""
    with beside(data) as engine, engine.connect() as db:
        rows = db.execute(select(CHECKPOINTS).where(CHECKPOINTS.c.deleted.is_(False))).all()
    rows_by_path = {f"tinker://{row.run}/{row.kind}/{row.name}": row for row in rows}
    for tenant in tenants:
        for path, expected in tenant.checkpoints.items():
            row = rows_by_path.get(path)
            folder = data / "checkpoints" / row.id if row is not None else None
            if row is not None and store is not None and row.digest is not None:
                folder = data.parent / "fetched" / row.id
                with suppress(MissingObjectError):
                    ObjectStore(store).fetch(row.digest, folder)
            if folder is None or not folder.is_dir():
                yield f"{tenant.name}: checkpoint {path} is lost"
            elif digest(folder) != digest(expected):
                yield f"{tenant.name}: checkpoint {path} differs from that of an undisturbed engine"


def unlisted_checkpoints(tenants: Sequence[Tenant], url: str) -> Iterable[str]:
    """Checkpoints that the API does not list to their owner, and those that it lists to others."""
    owned = {tenant.name: set(tenant.checkpoints) for tenant in tenants}
    for tenant in tenants:
        with _client(url, tenant.key) as http:
            answer = http.get("checkpoints", params={"limit": 100_000}).raise_for_status().json()
        listed = {entry["tinker_path"] for entry in answer["checkpoints"]}
        if missing := owned[tenant.name] - listed:
            yield f"{tenant.name}: {len(missing)} checkpoints are not listed, such as {min(missing)}"
        for other, paths in owned.items():
            if other != tenant.name and listed & paths:
                yield f"{tenant.name} sees checkpoints of {other}"


def leaks(tenants: Sequence[Tenant], url: str) -> Iterable[str]:
    """Requests of one tenant for what another owns, unless the answer is as for something that does not exist."""
    for tenant in tenants:
        others = [path for other in tenants if other is not tenant for path in list(other.checkpoints)[-2:]]
        with _client(url, tenant.key) as http:
            for path in others:
                run, kind, name = path.removeprefix("tinker://").split("/")
                for answer in (
                    http.get(f"training_runs/{run}"),
                    http.get(f"training_runs/{run}/checkpoints"),
                    http.post("retrieve_future", json={"request_id": f"{run}:1"}),
                    http.post("weights_info", json={"tinker_path": path}),
                    http.delete(f"training_runs/{run}/checkpoints/{kind}/{name}"),
                ):
                    if answer.status_code != 404:
                        yield f"{tenant.name} gets {answer.status_code} from {answer.request.url} of another tenant"


def open_requests(data: Path) -> Iterable[str]:
    """Requests without a result."""
    with beside(data) as engine, engine.connect() as db:
        pending = db.execute(select(func.count()).where(REQUESTS.c.state == "pending")).scalar_one()
    if pending:
        yield f"{pending} accepted requests have no result"


def leftovers(tenants: Sequence[Tenant], data: Path, url: str, admin_key: str) -> Iterable[str]:
    """Files, and objects in memory, that are left when every session has ended and the service has tidied up."""
    named = sum(len(tenant.checkpoints) for tenant in tenants)
    if not _becomes_true(lambda: len(_folders(data / "checkpoints")) <= named and not _folders(data / "journal")):
        yield (
            f"{len(_folders(data / 'checkpoints'))} checkpoint folders for {named} checkpoints, and "
            f"{len(_folders(data / 'journal'))} journal folders of ended models"
        )
    if temporary := [str(file.relative_to(data)) for file in data.rglob("*") if TEMPORARY.search(file.name)]:
        yield f"temporary files are left: {', '.join(sorted(temporary)[:5])}"
    open_objects = _gauges(url, admin_key)
    if open_objects:
        yield f"objects of ended sessions are left: {open_objects}"


def faulty_objects(data: Path, store: str, caches: Sequence[Path]) -> Iterable[str]:
    """Objects in a store on this machine that no row notes, so that nothing will delete them, and objects in caches
    that are not what their names say."""
    with beside(data) as engine, engine.connect() as db:
        noted = set(db.execute(select(OBJECTS.c.id)).scalars())
    if unnoted := set(_folders(Path(urlsplit(store).path) / "objects")) - noted:
        yield f"{len(unnoted)} objects of the store are noted nowhere, such as {min(unnoted)}"
    for cache in caches:
        for name in _folders(cache):
            if not name.startswith(".") and Manifest.of(cache / name).digest != name:
                yield f"the files of {cache / name} are others"


def memory_growth(before: int, after: int) -> Iterable[str]:
    """Memory that does not come back to its base."""
    if after - before > GROWTH_BYTES:
        yield f"the API process keeps {(after - before) / 2**20:.0f} MiB more than when it was ready"


def _becomes_true(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + TIDY_S
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []


def _gauges(url: str, key: str) -> Mapping[str, float]:
    """Objects of sessions, and requests in a queue, that the metrics count."""
    text = httpx.get(f"{url}/metrics", headers={"X-API-Key": key}, timeout=30).raise_for_status().text
    lines = re.findall(r"^(tinsmith_(?:objects|queue_requests)\{[^}]*\}) ([0-9.e+]+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in lines if 'kind="checkpoint"' not in name and float(value)}


def _client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60)
