"""Import: an adapter in a tar archive becomes a checkpoint of its sender, which can be trained on and sampled.

The engine reads the adapter as it reads a checkpoint, and writes the checkpoint itself: what it refuses is not stored.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from starlette.requests import ClientDisconnect, Request

from tinsmith.engine.base import LoraSpec, SavedAdapter
from tinsmith.engine.exchange.archive import CONFIG, MOMENTS, WEIGHTS, unpack
from tinsmith.engine.interface import Engine
from tinsmith.engine.lora.saved_spec import read_spec
from tinsmith.engine.validation import check_lora
from tinsmith.errors import BadRequest, EngineDied, Gone, TinsmithError, TooLarge
from tinsmith.service.checkpoints import check_name
from tinsmith.service.http.endpoint import Call, Json, Routes
from tinsmith.service.http.parameters import Parameters
from tinsmith.service.service import Service
from tinsmith.service.storage.records import Checkpoint, Model, Session

routes = Routes()

MAX_BYTES = 32 << 30


class ImportParameters(Parameters):
    """import_checkpoint."""

    name: str
    base_model: str


@routes.post("/import_checkpoint", params=ImportParameters)
async def import_checkpoint(call: Call[None, ImportParameters]) -> Json:
    """Store an adapter of `base_model` as a checkpoint `name`. The body is a tar archive of adapter_config.json,
    adapter_model.safetensors and, for the optimizer state, optimizer.safetensors."""
    service, tenant = call.service, call.tenant
    name, base_model = call.params.name, call.params.base_model
    check_name(name)
    worker = service.worker(base_model)
    service.quotas.check_storage(tenant)
    checkpoint_id = uuid.uuid4().hex
    async with _received(call.http, service, checkpoint_id) as source:
        optimizer = await asyncio.to_thread(_check_files, source)
        engine = await worker.host.wait_until_ready()
        with service.checkpoints.new_folder(checkpoint_id) as folder:
            read = await service.checkpoints.source_of(source)
            size = await _rewritten(engine, read, folder, optimizer=optimizer)
            await service.checkpoints.bring(folder)
            lora = await asyncio.to_thread(read_spec, folder)
            _check_spec(lora)  # a pattern of ranks may give more than the config's
    digest = await service.checkpoints.publish(checkpoint_id)
    now, session_id = time.time(), str(uuid.uuid4())
    session = Session(id=session_id, owner=tenant, created=now, seen=now, ended="success")
    model = Model(
        id=f"{session_id}:train:0",
        owner=tenant,
        session_id=session_id,
        base_model=base_model,
        lora=lora,
        created=now,
        metadata={"imported": "true"},
        state="ended",
    )
    checkpoint = Checkpoint(
        id=checkpoint_id,
        owner=tenant,
        run=model.id,
        kind="weights",
        name=name,
        base_model=base_model,
        lora=lora,
        created=now,
        made_by="",
        optimizer=True,
        size_bytes=size,
        digest=digest,
    )
    await service.store.put(session, model, checkpoint)
    service.checkpoints.recorded(checkpoint_id)
    service.audit_log.checkpoint_created(checkpoint, tenant, imported=True)
    return {"tinker_path": checkpoint.path}


@asynccontextmanager
async def _received(request: Request, service: Service, checkpoint_id: str) -> AsyncIterator[Path]:
    """A folder with the files of the archive in the body, until the block ends. A start deletes what a crash leaves."""
    declared = int(request.headers.get("content-length", 0))
    if declared > MAX_BYTES:
        raise TooLarge(f"The archive has {declared} bytes; at most {MAX_BYTES} are accepted.", "Use a lower rank.")
    service.disk.require(3 * declared)  # the archive, its files, the checkpoint
    folder = service.checkpoints.folder(f".{checkpoint_id}.import")
    await asyncio.to_thread(folder.mkdir)
    try:
        archive, size = folder / "archive.tar", 0
        with archive.open("wb") as file:
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BYTES:
                    raise TooLarge(f"The archive has over {MAX_BYTES} bytes.", "Use a lower rank.")
                await asyncio.to_thread(file.write, chunk)
        await asyncio.to_thread(unpack, archive, folder)
        archive.unlink()
        yield folder
    except ClientDisconnect as error:
        raise Gone("The client has disconnected.") from error
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _check_files(folder: Path) -> bool:
    """Whether the folder holds an optimizer state. Raises BadRequest for files that no engine should read."""
    _check_config(folder)
    try:
        shapes = [shape for shape, _ in _tensors(folder / WEIGHTS).values()]
        moments = _tensors(folder / MOMENTS) if (folder / MOMENTS).is_file() else None
    except (OSError, SafetensorError) as error:
        raise BadRequest(f"A file of the adapter cannot be read: {error}.", "Send it again.") from error
    size = sum(math.prod(shape) for shape in shapes)
    if moments is not None:
        expected = {"exp_avg": ([size], "F32"), "exp_avg_sq": ([size], "F32"), "steps": ([], "I64")}
        if moments != expected:
            raise BadRequest(
                f"{MOMENTS} is not the optimizer state of this adapter.", "Leave it out: its moments start at zero."
            )
    return moments is not None


def _tensors(file: Path) -> dict[str, tuple[list[int], str]]:
    """(shape, data type) of each tensor of a file."""
    with safe_open(file, framework="numpy") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - not a mapping
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}


def _check_config(folder: Path) -> None:
    """Raises BadRequest unless adapter_config.json has a rank and an alpha that an adapter can have."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        lora = LoraSpec(rank=int(config["r"]), alpha=float(config["lora_alpha"]), seed=0)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadRequest(
            f"{CONFIG} cannot be read: {error!r}.", "It needs r, lora_alpha and target_modules."
        ) from error
    _check_spec(lora)


def _check_spec(lora: LoraSpec) -> None:
    check_lora(lora)
    if not (math.isfinite(lora.alpha) and lora.alpha > 0):
        raise BadRequest(f"lora_alpha is {lora.alpha}.", "Give a finite number above 0.")


async def _rewritten(engine: Engine, source: SavedAdapter, to: Path, *, optimizer: bool) -> int:
    """Let the engine read an adapter and write it as a training state. Returns its size. Raises BadRequest."""
    model_id = f"import-{to.name}"
    try:
        await engine.fork(model_id, source, optimizer=optimizer)
        return await engine.save(model_id, to, optimizer=True)
    except EngineDied:
        raise
    except TinsmithError as error:
        reason = error.message.replace(str(source), "it")
        raise BadRequest(f"The archive does not fit: {reason}", error.hint) from error
    finally:
        await engine.drop(model_id)
