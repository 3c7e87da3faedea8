"""Routes of models in training: each validates a request, has the worker accept it, and returns a promise.

An accepted request is stored before its promise is returned; the worker runs it afterwards.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from tinsmith.engine.base import AdamParams, LoraSpec, Pass
from tinsmith.engine.training.shadow_plan import CHECKPOINT, SHADOW, shadow_settings
from tinsmith.engine.validation import check_adam, check_lora, check_pass
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.service.checkpoints import check_name, check_ttl
from tinsmith.service.concurrency import run_in_thread_if_large
from tinsmith.service.encryption import recipients
from tinsmith.service.http.bodies import PassBody
from tinsmith.service.http.endpoint import Call, EarlyResponse, Json, Routes
from tinsmith.service.observability.logs import add_log_context
from tinsmith.service.routes.custom_losses import attach_custom_loss
from tinsmith.service.service import Service
from tinsmith.service.shadows import check_not_shadow, live_model, registered_shadow, shadow_ttl
from tinsmith.service.storage.payloads import encode_operation
from tinsmith.service.storage.records import (
    Checkpoint,
    CreateModel,
    ForkModel,
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
from tinsmith.service.wire.passes import DecodedPass
from tinsmith.service.wire.protobuf import append_config
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
)

routes = Routes()

B = TypeVar("B", StepBody, SaveBody, SaveExternalBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest(Generic[B]):
    """A training request that was not accepted before, and the model that it is for."""

    body: B
    model: Model
    service: Service

    async def accept(self, operation: Operation) -> dict[str, Any]:
        """Accept the request as `operation`; returns its promise."""
        payload = encode_operation(operation)
        return await _accept(self.service, self.model, self.body.seq_id, operation, payload)


async def _new_request(call: Call[B]) -> NewRequest[B]:
    """The request and its model. A repeated request is answered with its promise."""
    body = call.body
    model = call.service.trainable_model(body.model_id, call.tenant)
    if not isinstance(body, StepBody):
        check_not_shadow(call.service, model, "saving")
    await _check_new(call.service, model, body.seq_id)
    return NewRequest(body=body, model=model, service=call.service)


async def _check_new(service: Service, model: Model, seq: int) -> None:
    """Answer with the promise if the model's request `seq` was accepted. Raises BadRequest if it is too late for it."""
    add_log_context(request_id=request_id_of(model.id, seq))
    if not 1 <= seq < 2**63:
        raise BadRequest(f"seq_id is {seq}.", "Number a model's requests from 1.")
    if await service.worker(model.base_model).is_accepted(model, seq):
        raise EarlyResponse({"request_id": request_id_of(model.id, seq)})


async def _accept(
    service: Service, model: Model, seq: int, operation: Operation, payload: bytes, *, is_new: bool = False
) -> dict[str, Any]:
    worker = service.worker(model.base_model)
    return {"request_id": await worker.accept(model, seq, operation, payload, is_new=is_new)}


@routes.post("/create_model", body=CreateModelBody)
async def create_model(call: Call[CreateModelBody]) -> Json:
    """Create a model with a fresh adapter. Without a seed from the client, the service draws one."""
    service, tenant, request = call.service, call.tenant, call.body
    session = service.sessions.touch(request.session_id, tenant)
    model_id = _model_id(request.session_id, request.model_seq_id)
    if service.store.find(Model, model_id) is not None:
        return {"request_id": request_id_of(model_id, 0), "model_id": model_id}
    service.worker(request.base_model)
    _check_adamw(request.optimizer_config)
    config = request.lora_config or LoraBody(rank=32)
    lora = LoraSpec(
        rank=config.rank,
        seed=config.seed if config.seed is not None else secrets.randbits(63),
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
    )
    check_lora(lora)
    model = _new_model(model_id, session.id, request.base_model, lora, tenant, request.user_metadata)
    with registered_shadow(service, model):
        promise = await _accept(service, model, 0, CreateModel(), encode_operation(CreateModel()), is_new=True)
    return {**promise, "model_id": model_id}


@routes.post("/get_info", body=GetInfoBody)
async def get_info(call: Call[GetInfoBody]) -> Json:
    """Describe a model. `tokenizer_id` is the tokenizer's hub id, or its folder for clients of this machine.

    Clients of other machines get no folder, and load the tokenizer by the model's name.
    """
    service = call.service
    model = service.model(call.body.model_id, call.tenant)
    card = await service.worker(model.base_model).host.card()
    tokenizer = await service.tokenizer_id(card)
    return {
        "type": "get_info",
        "model_id": model.id,
        "model_name": model.base_model,
        "model_data": {"arch": card.arch, "model_name": model.base_model, "tokenizer_id": tokenizer},
        "is_lora": True,
        "lora_rank": model.lora.rank,
        "optimizer_config": {"type": "adamw"},
    }


@routes.post("/forward_backward", body=PassBody())
async def forward_backward(call: Call[DecodedPass]) -> Json:
    """Run a forward pass, or forward and backward. The journal keeps the body as it was sent."""
    service, tenant, decoded = call.service, call.tenant, call.body
    seq, operation = decoded.seq, decoded.operation
    plain = decoded.plain if decoded.plain is not None else call.content
    model = service.trainable_model(operation.model_id, tenant)
    await _check_new(service, model, seq)
    service.sequences.check(decoded.claims, tenant)
    operation, payload = attach_custom_loss(service, model, operation, plain)
    card = await service.worker(model.base_model).host.card()
    await run_in_thread_if_large(len(plain), check_pass, operation, card)
    if operation.loss_fn == SHADOW and operation.loss_config.get("shadow/at"):
        operation, payload = _with_checkpoint(service, model, operation, payload)
    return await _accept(service, model, seq, operation, payload)


def _with_checkpoint(service: Service, model: Model, operation: Pass, payload: bytes) -> tuple[Pass, bytes]:
    """A shadow pass and its payload with the id of the checkpoint that it starts from."""
    inherits = shadow_settings(operation).optimizer == "adam_inherit"
    body = LoadBody(path=str(operation.loss_config["shadow/at"]), optimizer=inherits)
    checkpoint = _loadable_checkpoint(service, model.owner, body, model.base_model)
    config = {**operation.loss_config, CHECKPOINT: checkpoint.id}
    return replace(operation, loss_config=config), append_config(payload, config)


@routes.post("/optim_step", body=StepBody)
async def optim_step(call: Call[StepBody]) -> Json:
    """Update the model with one AdamW step."""
    new = await _new_request(call)
    _check_adamw(new.body.optimizer_params)
    if new.body.adam_params is None:
        raise BadRequest("optim_step has no adam_params.", "Send all six, or {} for the defaults.")
    adam = AdamParams(**new.body.adam_params.model_dump())
    check_adam(adam)
    return await new.accept(OptimStep(adam=adam))


@routes.post("/save_weights", body=SaveBody)
async def save_weights(call: Call[SaveBody]) -> Json:
    """Save weights and optimizer state as a named checkpoint."""
    new = await _new_request(call)
    request = new.body
    name = request.path if request.path is not None else f"{request.seq_id:06d}"
    check_name(name)
    check_ttl(request.ttl_seconds)
    existing = new.service.checkpoints.by_name(new.model.id, "weights", name)
    if existing is not None and not request.overwrite:
        raise BadRequest(f"{existing.path} exists.", "Choose another name or pass overwrite=True.")
    ttl, metadata = request.ttl_seconds, request.user_metadata
    return await new.accept(SaveState(name=name, overwrite=request.overwrite, ttl_seconds=ttl, metadata=metadata))


@routes.post("/save_weights_for_sampler", body=SaveBody)
async def save_weights_for_sampler(call: Call[SaveBody]) -> Json:
    """Save weights for sampling: as a named checkpoint, or without a name into a sampling session.

    A `snapshot` session keeps these weights; an `inflight` session switches to those of later inflight saves.
    """
    new = await _new_request(call)
    request = new.body
    check_ttl(request.ttl_seconds)
    kinds = ("snapshot", "inflight") if request.path is None else ("snapshot",)
    if request.kind not in kinds:
        raise BadRequest(f"kind is '{request.kind}'.", "Give snapshot or, without a path, inflight.")
    ttl, metadata = request.ttl_seconds, request.user_metadata
    if request.path is not None:
        _check_new_name(new.service, new.model, "sampler_weights", request.path)
        return await new.accept(SaveSampler(name=request.path, ttl_seconds=ttl, metadata=metadata))
    if request.sampling_session_seq_id is None:
        raise BadRequest("save_weights_for_sampler has neither path nor sampling_session_seq_id.", "Give one of them.")
    new.service.quotas.check_sampling_session(new.model.session_id)
    sampler_id = f"{new.model.session_id}:sample:{request.sampling_session_seq_id}"
    inflight = request.kind == "inflight"
    return await new.accept(SaveSampler(sampler_id=sampler_id, inflight=inflight, ttl_seconds=ttl, metadata=metadata))


@routes.post("/save_weights_external", body=SaveExternalBody)
async def save_weights_external(call: Call[SaveExternalBody]) -> Json:
    """Export weights as PEFT files with signed links, encrypted if there are recipients."""
    new = await _new_request(call)
    request = new.body
    check_ttl(request.ttl_seconds)
    public_keys = request.age_encryption_recipients or []
    recipients(public_keys)
    _check_new_name(new.service, new.model, "external_weights", request.path)
    return await new.accept(SaveExternal(name=request.path, ttl_seconds=request.ttl_seconds, recipients=public_keys))


@routes.post("/load_weights", body=LoadBody)
async def load_weights(call: Call[LoadBody]) -> Json:
    """Load a checkpoint into a new model (session_id, model_seq_id) or an existing one (model_id, seq_id)."""
    service, tenant, request = call.service, call.tenant, call.body
    if request.model_id is None:
        return await _create_by_load(service, tenant, request)
    model = service.trainable_model(request.model_id, tenant)
    if request.seq_id is None:
        raise BadRequest("load_weights with model_id has no seq_id.", "Send the model's next seq_id.")
    check_not_shadow(service, model, "load_weights")
    await _check_new(service, model, request.seq_id)
    checkpoint = _loadable_checkpoint(service, tenant, request, model.base_model)
    if replace(checkpoint.lora, seed=model.lora.seed) != model.lora:
        raise BadRequest(
            f"{request.path} holds {checkpoint.lora}; the model has {model.lora}.", "Create a model from it."
        )
    operation = LoadWeights(path=request.path, checkpoint=checkpoint.id, optimizer=request.optimizer)
    return await _accept(service, model, request.seq_id, operation, encode_operation(operation))


async def _create_by_load(service: Service, tenant: str, request: LoadBody) -> dict[str, Any]:
    if request.session_id is None or request.model_seq_id is None:
        raise BadRequest("load_weights names no model.", "Send session_id and model_seq_id, or model_id and seq_id.")
    session = service.sessions.touch(request.session_id, tenant)
    model_id = _model_id(request.session_id, request.model_seq_id)
    if service.store.find(Model, model_id) is not None:
        return {"request_id": request_id_of(model_id, 0), "model_id": model_id}
    source = live_model(service, request.path, tenant)
    is_shadow = shadow_ttl(request.user_metadata) is not None
    loaded = source or _loadable_checkpoint(service, tenant, request, request.base_model)
    base_model = request.base_model or loaded.base_model
    model = _new_model(model_id, session.id, base_model, loaded.lora, tenant, request.user_metadata)
    path, optimizer = request.path, request.optimizer
    operation: Operation
    if source is not None:
        _check_live(service, source, base_model, is_shadow=is_shadow)
        operation = ForkModel(path=path, source=source.id, optimizer=optimizer)
    elif is_shadow:
        operation = ForkModel(path=path, checkpoint=loaded.id, optimizer=optimizer)
    else:
        operation = LoadWeights(path=path, checkpoint=loaded.id, optimizer=optimizer, creates=True)
    with registered_shadow(service, model):
        promise = await _accept(service, model, 0, operation, encode_operation(operation), is_new=True)
    return {**promise, "model_id": model_id}


def _check_live(service: Service, source: Model, base_model: str, *, is_shadow: bool) -> None:
    if not is_shadow:
        raise BadRequest(
            f"Only a shadow can be made of the current weights of {source.id}.",
            'Pass user_metadata={"role": "shadow"}, or load the path that save_state returns.',
        )
    if service.worker(base_model) is not service.worker(source.base_model):
        raise BadRequest(f"{source.id} belongs to {source.base_model}, not to {base_model}.", "Omit base_model.")


def _loadable_checkpoint(service: Service, tenant: str, request: LoadBody, base_model: str | None) -> Checkpoint:
    """The checkpoint to load. Raises BadRequest if it does not fit the base model or lacks the optimizer state."""
    _check_adamw(request.optimizer_config)
    token_owner = service.token_owner(request.weights_access_token, request.path)
    checkpoint = service.checkpoints.readable(request.path, tenant, token_owner)
    if checkpoint.kind == "external_weights":
        raise BadRequest(f"{request.path} holds external weights.", "Load a tinker://RUN/weights/NAME path.")
    if request.optimizer and not checkpoint.optimizer:
        raise BadRequest(
            f"{request.path} holds no optimizer state.", "Load it without, or load a checkpoint of save_state."
        )
    expected = base_model or checkpoint.base_model
    if service.worker(expected) is not service.worker(checkpoint.base_model):
        raise BadRequest(f"{request.path} belongs to {checkpoint.base_model}, not to {expected}.", "Omit base_model.")
    service.audit_log.checkpoint_read(checkpoint, tenant, "training")
    return checkpoint


def _check_new_name(service: Service, model: Model, kind: str, name: str) -> None:
    """Raise BadRequest unless `name` is valid and not yet one of the model's checkpoints of this kind."""
    check_name(name)
    existing = service.checkpoints.by_name(model.id, kind, name)
    if existing is not None:
        raise BadRequest(f"{existing.path} exists.", "Choose another name or delete it first.")


def _model_id(session_id: str, number: int) -> str:
    """A model's id, which the client computes in the same way."""
    return f"{session_id}:train:{number}"


def _new_model(
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


def _check_adamw(optimizer: OptimizerBody | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise Unsupported(f"Optimizer '{optimizer.type}' is not supported.", "Use adamw: AdamParams in optim_step.")


@routes.post("/unload_model", body=UnloadBody)
async def unload_model(call: Call[UnloadBody]) -> Json:
    """End a model after its queued requests; its checkpoints stay. Only SDKs before 0.26 call this route."""
    service, tenant = call.service, call.tenant
    model = service.model(call.body.model_id, tenant)
    if model.state != "ended":
        service.worker(model.base_model).unload(model)
    request_id = f"{model.id}:unload"
    service.futures.open(request_id, tenant, stored=False)
    service.futures.resolve(request_id, FutureResult.of({"model_id": model.id, "type": "unload_model"}))
    return {"request_id": request_id, "model_id": model.id}
