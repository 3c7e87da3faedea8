"""Shadows: models for hypothetical steps. A client creates one with user_metadata={"role": "shadow", "ttl": SECONDS}.

A shadow of a checkpoint, or of the current weights of a model in training (tinker://MODEL_ID/weights/@live), shares
their memory until its first step. It is in memory only: nothing lists or journals it, it cannot be saved, and it ends
when it was idle for its ttl, with its session, or with the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tinsmith.errors import BadRequest
from tinsmith.service.checkpoints import LIVE
from tinsmith.service.service import Service
from tinsmith.service.storage.records import Model, Shadow

TTL_S = 600.0
"""Time to live of a shadow whose metadata has none."""
MAX_TTL_S = 86_400.0
_LIVE_PREFIX, _LIVE_SUFFIX = "tinker://", f"/weights/{LIVE}"


def shadow_ttl(metadata: Mapping[str, Any] | None) -> float | None:
    """The time to live of a shadow with this metadata, in seconds; None for a model that is no shadow."""
    if metadata is None or metadata.get("role") != "shadow":
        return None
    try:
        ttl_s = float(metadata.get("ttl", TTL_S))
    except (TypeError, ValueError):
        ttl_s = 0.0
    if not 0 < ttl_s <= MAX_TTL_S:
        raise BadRequest(f"The ttl of a shadow is {metadata['ttl']!r}.", f"Give seconds, at most {MAX_TTL_S:.0f}.")
    return ttl_s


def live_model(service: Service, path: str, tenant: str) -> Model | None:
    """The tenant's model whose current weights a path names; None for the path of a checkpoint."""
    if not (path.startswith(_LIVE_PREFIX) and path.endswith(_LIVE_SUFFIX)):
        return None
    return service.trainable_model(path.removeprefix(_LIVE_PREFIX).removesuffix(_LIVE_SUFFIX), tenant)


@contextmanager
def registered_shadow(service: Service, model: Model) -> Iterator[None]:
    """Register a model that is about to be accepted, if it is a shadow; an error in the block removes it again.

    Raises Forbidden if the tenant has too many shadows.
    """
    ttl_s = shadow_ttl(model.metadata)
    if ttl_s is None:
        yield
        return
    service.quotas.check_shadow(model.owner)
    service.store.shadows[model.id] = Shadow(model=model, ttl_s=ttl_s)
    try:
        yield
    except BaseException:
        del service.store.shadows[model.id]
        raise


def check_not_shadow(service: Service, model: Model, request: str) -> None:
    """Raise BadRequest for a request that shadows do not support."""
    if model.id in service.store.shadows:
        raise BadRequest(
            f"Model {model.id} is a shadow, which does not support {request}.",
            "Create a model without the role shadow, or make another shadow.",
        )
