"""The public methods of the SDK clients, listed by reflection, and their cases.

A case belongs to `Class.method`. `_async` forms run the case of the plain method, and futures of clients run the cases
of the client. The suite fails for a method without a case, which reveals new SDK methods.
"""

from __future__ import annotations

from collections.abc import Callable

import tinker
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

from tests.conformance.world import World

Case = Callable[[World], None]

CLIENTS = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient, tinker.AdminClient)
FUTURES = {
    tinker.BackcompatTrainingClientFuture: tinker.TrainingClient,
    tinker.BackcompatSamplingClientFuture: tinker.SamplingClient,
}
"""Future class -> its client class; the future also has the methods of the client."""
PLAIN_FUTURES = (tinker.APIFuture, AwaitableConcurrentFuture)

CASES: dict[str, Case] = {}


def case(*methods: str) -> Callable[[Case], Case]:
    """Register a function as the case of these methods."""

    def keep(made: Case) -> Case:
        for method in methods:
            assert method not in CASES, method
            CASES[method] = made
        return made

    return keep


def public(kind: type) -> list[str]:
    """Names of methods and properties that are not private."""
    return [name for name in dir(kind) if not name.startswith("_")]


def methods() -> list[str]:
    """Every `Class.method`."""
    return [f"{kind.__name__}.{name}" for kind in (*CLIENTS, *FUTURES, *PLAIN_FUTURES) for name in public(kind)]


def case_of(method: str) -> tuple[Case | None, bool, bool]:
    """(case of the method, whether in its async form, whether through a future)."""
    kind, name = method.split(".")
    through = {future.__name__: client for future, client in FUTURES.items()}.get(kind)
    if any(kind == item.__name__ for item in PLAIN_FUTURES) or (through and name in public(tinker.APIFuture)):
        return CASES.get(f"APIFuture.{name}"), False, False
    base = name.removesuffix("_async")
    holder = through.__name__ if through else kind
    case = CASES.get(f"{holder}.{base}")
    return case, name != base, through is not None
