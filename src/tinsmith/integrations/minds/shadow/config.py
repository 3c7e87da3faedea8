"""Settings of shadow steps, and the optimizer parameters that they become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tinsmith.settings import Needs, Settings

Method = Literal["auto", "virtual", "fork", "reverse"]
Rung = Literal["virtual", "fork", "reverse"]
Optimizer = Literal["sgd", "adam_fresh", "adam_inherit"]
Mode = Literal["exact", "first_order"]

SGD_EPS = 1e8
"""eps of Adam that makes it SGD: the first step is lr * g / (|g| + eps), and |g| is nothing beside eps."""


_OLDER_VERSIONS = 4
"""Older versions that steps may start from in runs whose staleness is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParams:
    """Optimizer and its parameters for a shadow step.

    Example: StepParams(optimizer="adam_fresh", learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
    """

    optimizer: Optimizer
    learning_rate: float
    beta1: float
    beta2: float
    eps: float

    @property
    def adam_rate(self) -> float:
        """Learning rate of an Adam that takes this step."""
        return self.learning_rate * SGD_EPS if self.optimizer == "sgd" else self.learning_rate

    @property
    def adam_eps(self) -> float:
        """eps of an Adam that takes this step."""
        return SGD_EPS if self.optimizer == "sgd" else self.eps


class ShadowConfig(Settings):
    """Shadow steps: by how much one optimizer step on a text would change the logprobs of probes.

    Used only by environments and workflows that need them, such as gradient_intuition (docs/research/shadow.md).
    """

    method: Method = "auto"
    """How steps are taken. `virtual`: many in one call of a server with the loss `shadow`. `fork`: each on a copy of
    the policy, on any Tinker server. `reverse`: one copy for each probe and version, for optimizer sgd. `auto`:
    virtual where the server has it, else reverse for sgd and fork for the others."""
    optimizer: Optimizer = "sgd"
    """`sgd`: the step is learning_rate times the gradient. `adam_fresh`: Adam without moments. `adam_inherit`: Adam
    with the policy's moments."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Learning rate of the step."""
    beta1: Annotated[float, Needs("optimizer", ("adam_fresh", "adam_inherit"))] = Field(default=0.9, ge=0, lt=1)
    """Decay rate of Adam's first moment."""
    beta2: Annotated[float, Needs("optimizer", ("adam_fresh", "adam_inherit"))] = Field(default=0.95, ge=0, lt=1)
    """Decay rate of Adam's second moment."""
    eps: Annotated[float, Needs("optimizer", ("adam_fresh", "adam_inherit"))] = Field(default=1e-8, gt=0)
    """Term added to the denominator of Adam."""
    mode: Annotated[Mode, Needs("method", ("auto", "virtual"))] = "exact"
    """`exact` measures the probes after the step; `first_order` multiplies gradients, which is exact for small learning
    rates and needs one pass less. Only virtual steps have first_order."""
    audit: Annotated[float, Needs("mode", ("first_order",))] = Field(default=0.02, ge=0, le=1)
    """Share of the first-order results that are measured exactly too. If their correlation falls below 0.99, the run
    continues with mode exact."""
    live_forks: Annotated[int, Needs("method", ("auto", "fork"))] = Field(default=4, ge=1)
    """Largest number of copies in use at once, by method fork. Method reverse keeps one for each probe and version."""
    forks_per_session: Annotated[int, Needs("method", ("auto", "fork", "reverse"))] = Field(default=16, ge=1)
    """Copies after which their session ends, so that the server frees them."""
    gather_seconds: Annotated[float, Needs("method", ("auto", "virtual"))] = Field(default=0.02, ge=0)
    """Time in which the virtual steps of concurrent rollouts are gathered into one call."""
    older_versions: int | None = Field(default=None, ge=0)
    """How many versions of the policy before the newest steps may start from; their weights are saved before each step
    of the policy. Not set: the run's staleness, or 4 if sync.style is not fixed."""
    ttl_seconds: int = Field(default=3600, ge=3600)
    """Seconds until the server deletes the saved weights that copies start from."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> ShadowConfig:
        if self.method == "reverse" and self.optimizer != "sgd":
            raise ValueError(f"method reverse takes sgd steps, not {self.optimizer}; set method to virtual or fork")
        return self

    def versions(self, staleness: int | None) -> int:
        """How many older versions of the policy steps may start from, in a run of this staleness."""
        default = _OLDER_VERSIONS if staleness is None else staleness
        return default if self.older_versions is None else self.older_versions

    @property
    def params(self) -> StepParams:
        """The optimizer of the steps."""
        return StepParams(
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
        )
