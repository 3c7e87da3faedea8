"""Training requests: parse, refuse what is not in order, write it down, promise. The worker does the rest."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Header

from tinsmith.engine.base import AdamParams, LoraSpec, Pass
from tinsmith.engine.validation import check_adam, check_lora, check_pass
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.service.checkpoints import check_name, check_ttl
from tinsmith.service.concurrency import run_in_thread_if_large
from tinsmith.service.dependencies import RawBody, Service, ServiceDep, Tenant
from tinsmith.service.encryption import recipients
from tinsmith.service.observability.logs import add_log_context
from tinsmith.service.routes.custom_losses import with_uploaded
from tinsmith.service.storage.payloads import encode_operation
from tinsmith.service.storage.records import (
    Checkpoint,
    CreateModel,
    FutureResult,
    LoadWeights,
    Model,
    Operation,
    OptimStep,
    SaveExternal,
    SaveSampler,
    SaveState,
    request_id_of,
)
from tinsmith.service.wire.protobuf import MAX_BODY_BYTES, decompress, parse_pass, pass_from_message
from tinsmith.service.wire.provenance import Claim, parse_claims
from tinsmith.service.wire.schemas import (
    CreateModelBody,
    GetInfoBody,
    LoadBody,
    LoraBody,
    OptimizerBody,
    SaveBody,
    SaveExternalBody,
    StepBody,
    UnloadBody,
    parse,
)

router = APIRouter()


@router.post("/create_model")
async def create_model(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """A fresh adapter; a seed is drawn where the client gave none."""
    asked = parse(CreateModelBody, body)
    session = service.sessions.touch(asked.session_id, tenant)
    model_id = _model_id(asked.session_id, asked.model_seq_id)
    if service.store.find(Model, model_id) is not None:
        return {"request_id": request_id_of(model_id, 0), "model_id": model_id}
    service.worker(asked.base_model)
    _only_adamw(asked.optimizer_config)
    config = asked.lora_config or LoraBody(rank=32)
    lora = LoraSpec(
        rank=config.rank,
        seed=config.seed if config.seed is not None else secrets.randbits(63),
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
    )
    check_lora(lora)
    model = _model(model_id, session.id, asked.base_model, lora, tenant, asked.user_metadata)
    promise = await _promise(service, model, 0, CreateModel(), encode_operation(CreateModel()), new=True)
    return {**promise, "model_id": model_id}


@router.post("/get_info")
async def get_info(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """What a model is. `tokenizer_id` is what loads on this machine, whatever name it is served under; a client that
    may be elsewhere is not told a folder, and goes by the name."""
    model = service.model(parse(GetInfoBody, body).model_id, tenant)
    card = await service.worker(model.base_model).host.card()
    tokenizer = card.tokenizer if service.config.is_loopback or not card.tokenizer.startswith("/") else None
    return {
        "type": "get_info",
        "model_id": model.id,
        "model_name": model.base_model,
        "model_data": {"arch": card.arch, "model_name": model.base_model, "tokenizer_id": tokenizer},
        "is_lora": True,
        "lora_rank": model.lora.rank,
        "optimizer_config": {"type": "adamw"},
    }


@router.post("/forward_backward")
async def forward_backward(
    tenant: Tenant, service: ServiceDep, body: RawBody, content_encoding: Annotated[str | None, Header()] = None
) -> dict[str, Any]:
    """A pass, with or without gradients; the body is kept as it came."""
    plain, seq, work, claims = await run_in_thread_if_large(
        MAX_BODY_BYTES if content_encoding else len(body), _read, body, content_encoding
    )
    model = service.trainable_model(work.model_id, tenant)
    if await _promised(service, model, seq):
        return _promise_of(model, seq)
    service.sampling.check(claims, tenant)
    work, kept = with_uploaded(service, model, work, plain)
    await run_in_thread_if_large(len(plain), check_pass, work, await service.worker(model.base_model).host.card())
    return await _promise(service, model, seq, work, kept)


def _read(body: bytes, content_encoding: str | None) -> tuple[bytes, int, Pass, list[Claim]]:
    plain = decompress(body, content_encoding)
    message = parse_pass(plain)
    seq, work = pass_from_message(message)
    return plain, seq, work, parse_claims(message, [(len(datum.tokens), len(datum.targets)) for datum in work.data])


@router.post("/optim_step")
async def optim_step(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """One AdamW step."""
    asked = parse(StepBody, body)
    model = service.trainable_model(asked.model_id, tenant)
    if await _promised(service, model, asked.seq_id):
        return _promise_of(model, asked.seq_id)
    _only_adamw(asked.optimizer_params)
    if asked.adam_params is None:
        raise BadRequest("optim_step has no adam_params.", "Send all six, or {} for the defaults.")
    adam = AdamParams(**asked.adam_params.model_dump())
    check_adam(adam)
    work = OptimStep(adam=adam)
    return await _promise(service, model, asked.seq_id, work, encode_operation(work))


@router.post("/save_weights")
async def save_weights(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """Weights and optimizer into a named checkpoint."""
    asked = parse(SaveBody, body)
    model = service.trainable_model(asked.model_id, tenant)
    if await _promised(service, model, asked.seq_id):
        return _promise_of(model, asked.seq_id)
    name = asked.path if asked.path is not None else f"{asked.seq_id:06d}"
    check_name(name)
    check_ttl(asked.ttl_seconds)
    standing = service.checkpoints.by_name(model.id, "weights", name)
    if standing is not None and not asked.overwrite:
        raise BadRequest(f"{standing.path} exists.", "Choose another name or pass overwrite=True.")
    work = SaveState(name=name, overwrite=asked.overwrite, ttl_seconds=asked.ttl_seconds, metadata=asked.user_metadata)
    return await _promise(service, model, asked.seq_id, work, encode_operation(work))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """Weights for sampling: into a named checkpoint, or unnamed into a sampling session, which keeps them (snapshot)
    or goes on with those of later inflight saves (inflight)."""
    asked = parse(SaveBody, body)
    model = service.trainable_model(asked.model_id, tenant)
    if await _promised(service, model, asked.seq_id):
        return _promise_of(model, asked.seq_id)
    check_ttl(asked.ttl_seconds)
    kinds = ("snapshot", "inflight") if asked.path is None else ("snapshot",)
    if asked.kind not in kinds:
        raise BadRequest(f"kind is '{asked.kind}'.", "Give snapshot or, without a path, inflight.")
    if asked.path is not None:
        _check_new_name(service, model, "sampler_weights", asked.path)
        work = SaveSampler(name=asked.path, ttl_seconds=asked.ttl_seconds, metadata=asked.user_metadata)
    elif asked.sampling_session_seq_id is not None:
        sampler_id = f"{model.session_id}:sample:{asked.sampling_session_seq_id}"
        kept = {"ttl_seconds": asked.ttl_seconds, "metadata": asked.user_metadata}
        work = SaveSampler(sampler_id=sampler_id, inflight=asked.kind == "inflight", **kept)
    else:
        raise BadRequest("save_weights_for_sampler has neither path nor sampling_session_seq_id.", "Give one of them.")
    return await _promise(service, model, asked.seq_id, work, encode_operation(work))


@router.post("/save_weights_external")
async def save_weights_external(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """Weights for use elsewhere: PEFT's files behind links, encrypted if there are recipients."""
    asked = parse(SaveExternalBody, body)
    model = service.trainable_model(asked.model_id, tenant)
    if await _promised(service, model, asked.seq_id):
        return _promise_of(model, asked.seq_id)
    check_ttl(asked.ttl_seconds)
    given = asked.age_encryption_recipients or []
    recipients(given)
    _check_new_name(service, model, "external_weights", asked.path)
    work = SaveExternal(name=asked.path, ttl_seconds=asked.ttl_seconds, recipients=given)
    return await _promise(service, model, asked.seq_id, work, encode_operation(work))


@router.post("/load_weights")
async def load_weights(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """A checkpoint into a model: a new one (session_id, model_seq_id) or one that is there (model_id, seq_id)."""
    asked = parse(LoadBody, body)
    if asked.model_id is None:
        return await _create_by_load(service, tenant, asked)
    model = service.trainable_model(asked.model_id, tenant)
    if asked.seq_id is None:
        raise BadRequest("load_weights with model_id has no seq_id.", "Send the next one.")
    if await _promised(service, model, asked.seq_id):
        return _promise_of(model, asked.seq_id)
    checkpoint = _loadable(service, tenant, asked, model.base_model)
    if replace(checkpoint.lora, seed=model.lora.seed) != model.lora:
        raise BadRequest(
            f"{asked.path} holds {checkpoint.lora}; the model has {model.lora}.", "Create a model from it."
        )
    work = LoadWeights(path=asked.path, checkpoint=checkpoint.id, optimizer=asked.optimizer)
    return await _promise(service, model, asked.seq_id, work, encode_operation(work))


async def _create_by_load(service: Service, tenant: str, asked: LoadBody) -> dict[str, Any]:
    if asked.session_id is None or asked.model_seq_id is None:
        raise BadRequest("load_weights says no model.", "Send session_id and model_seq_id, or model_id and seq_id.")
    session = service.sessions.touch(asked.session_id, tenant)
    model_id = _model_id(asked.session_id, asked.model_seq_id)
    if service.store.find(Model, model_id) is not None:
        return {"request_id": request_id_of(model_id, 0), "model_id": model_id}
    checkpoint = _loadable(service, tenant, asked, asked.base_model)
    base_model = asked.base_model or checkpoint.base_model
    model = _model(model_id, session.id, base_model, checkpoint.lora, tenant, asked.user_metadata)
    work = LoadWeights(path=asked.path, checkpoint=checkpoint.id, optimizer=asked.optimizer, creates=True)
    promise = await _promise(service, model, 0, work, encode_operation(work), new=True)
    return {**promise, "model_id": model_id}


def _loadable(service: Service, tenant: str, asked: LoadBody, base_model: str | None) -> Checkpoint:
    """The checkpoint, if it fits the base model and holds what is asked of it."""
    _only_adamw(asked.optimizer_config)
    lender = service.token_owner(asked.weights_access_token, asked.path)
    checkpoint = service.checkpoints.readable(asked.path, tenant, lender)
    if checkpoint.kind == "external_weights":
        raise BadRequest(f"{asked.path} is for use elsewhere.", "Load a tinker://RUN/weights/NAME path.")
    if asked.optimizer and not checkpoint.optimizer:
        raise BadRequest(f"{asked.path} holds no optimizer state.", "Load it without, or load one of save_state.")
    wanted = base_model or checkpoint.base_model
    if service.worker(wanted) is not service.worker(checkpoint.base_model):
        raise BadRequest(f"{asked.path} belongs to {checkpoint.base_model}, not to {wanted}.", "Leave base_model out.")
    service.audit_log.checkpoint_read(checkpoint, tenant, "training")
    return checkpoint


def _check_new_name(service: Service, model: Model, kind: str, name: str) -> None:
    """Raises BadRequest unless it is a name, and not yet one of the model's checkpoints of this kind."""
    check_name(name)
    standing = service.checkpoints.by_name(model.id, kind, name)
    if standing is not None:
        raise BadRequest(f"{standing.path} exists.", "Choose another name or delete it first.")


async def _promised(service: Service, model: Model, seq: int) -> bool:
    """Whether this number was accepted before: a client that repeats itself must not train twice.

    Payloads are not compared: a repeated save carries a new sampling_session_seq_id.
    """
    add_log_context(request_id=request_id_of(model.id, seq))
    if not 1 <= seq < 2**63:
        raise BadRequest(f"seq_id is {seq}.", "The first request of a model has 1.")
    return await service.worker(model.base_model).is_accepted(model, seq)


async def _promise(
    service: Service, model: Model, seq: int, work: Operation, payload: bytes, *, new: bool = False
) -> dict[str, Any]:
    """Accept a request and return the promise of its result."""
    worker = service.worker(model.base_model)
    return {"request_id": await worker.accept(model, seq, work, payload, is_new=new)}


def _promise_of(model: Model, seq: int) -> dict[str, Any]:
    return {"request_id": request_id_of(model.id, seq)}


def _model_id(session_id: str, number: int) -> str:
    """The client computes the same string by itself."""
    return f"{session_id}:train:{number}"


def _model(
    model_id: str, session_id: str, base_model: str, lora: LoraSpec, owner: str, metadata: dict[str, Any] | None
) -> Model:
    return Model(
        id=model_id,
        owner=owner,
        session_id=session_id,
        base_model=base_model,
        lora=lora,
        created=time.time(),
        metadata=metadata,
    )


def _only_adamw(optimizer: OptimizerBody | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise Unsupported(f"Optimizer '{optimizer.type}' is not served here.", "Use adamw: AdamParams in optim_step.")


@router.post("/unload_model")
async def unload_model(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """End a model after all that waits for it; its checkpoints stay."""
    model = service.model(parse(UnloadBody, body).model_id, tenant)
    if model.state != "ended":
        service.worker(model.base_model).unload(model)
    request_id = f"{model.id}:unload"
    service.futures.open(request_id, tenant, stored=True)
    service.futures.resolve(request_id, FutureResult.of({"model_id": model.id, "type": "unload_model"}))
    return {"request_id": request_id, "model_id": model.id}
