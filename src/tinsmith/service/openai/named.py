"""The names by which clients of the OpenAI dialect call weights.

A served base model; `tinker://RUN/KIND/NAME`, the caller's own or published, alone or as `BASE;tinker://…`; a sampling
session's id; or a model in training, `SESSION:train:N`, which is its newest saved weights: `save_weights_for_sampler`
and `save_weights` move it. What was trained since is not in it: no request sees weights that nothing can name again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tinsmith.engine.checks import nearest
from tinsmith.errors import BadRequest, NotFound
from tinsmith.service.deps import Service
from tinsmith.service.records import Checkpoint, Model, Sampler
from tinsmith.service.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What answers under a name at this moment."""

    base_model: str
    worker: Worker
    version: str | None
    """None: the base model itself."""
    weights: str
    """What tells these weights from all others: a checkpoint's path, or the base model's name."""


def named(service: Service, name: str, owner: str) -> Named:
    """Raises NotFound for what is not there and for what is another's."""
    if name in service.workers:
        return _of(service, name, None)
    base_model, semicolon, path = name.partition(";")
    if not semicolon:
        base_model, path = "", name
    if path.startswith("tinker://"):
        checkpoint = service.checkpoints.readable(path, owner)
        if checkpoint.kind == "external_weights":
            raise BadRequest(f"{path} is for use elsewhere.", "Give a tinker://RUN/sampler_weights/NAME path.")
        found = _of(service, None, checkpoint)
        if base_model and service.worker(base_model) is not found.worker:
            raise BadRequest(f"{path} belongs to {found.base_model}, not to {base_model}.", "Give the path alone.")
        return found
    sampler = service.store.find(Sampler, name)
    if sampler is not None and sampler.owner == owner:
        return Named(
            base_model=sampler.base_model,
            worker=service.worker(sampler.base_model),
            version=service.sampling.version_of(sampler),
            weights=sampler.model_path or sampler.id,
        )
    model = service.store.find(Model, name)
    if model is not None and model.owner == owner:
        return _of(service, None, newest(service, model))
    raise NotFound(
        f"There is no model {name}.",
        f"{nearest(name, service.workers)} Or give a tinker:// path, or the id of a model in training.",
    )


def callable_models(service: Service, owner: str) -> list[str]:
    """Ids of the owner's models that `named` finds: their base model is served, and they have saved weights."""
    mine = (one for one in service.store.all(Model) if one.owner == owner and one.base_model in service.workers)
    return [one.id for one in mine if _saved(service, one)]


def newest(service: Service, model: Model) -> Checkpoint:
    """The weights that were saved last. Raises NotFound."""
    saved = _saved(service, model)
    if not saved:
        raise NotFound(f"Model {model.id} has saved no weights yet.", "Call save_weights_for_sampler first.")
    return max(saved, key=lambda one: one.created)


def _saved(service: Service, model: Model) -> list[Checkpoint]:
    made = service.store.of_run(model.id)
    return [one for one in made if one.kind != "external_weights" and not one.deleted and _lasts(one)]


def _lasts(checkpoint: Checkpoint) -> bool:
    return checkpoint.expires is None or checkpoint.expires > time.time()


def _of(service: Service, base_model: str | None, checkpoint: Checkpoint | None) -> Named:
    name = base_model or (checkpoint.base_model if checkpoint else "")
    return Named(
        base_model=name,
        worker=service.worker(name),
        version=checkpoint.id if checkpoint else None,
        weights=checkpoint.path if checkpoint else name,
    )
