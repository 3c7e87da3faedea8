"""Virtual optimizer steps (loss_fn `shadow`): settings, groups, and which of them must be computed. Without torch.

Each group has train data and, after them, probes. A virtual step trains a copy of the adapter on the group's train data
and reports how the logprobs of its probes change: delta = sum w (logprob after - logprob before).

    exact        both are computed
    first_order  delta is the inner product of the update and the probe's gradient; one backward for each distinct
                 probe, and one for each group or, where this is cheaper, forward passes (shadow_differences.py)

Equal train data are trained on once, and equal probes scored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinsmith.engine.base import AdamParams, Datum, Pass, PassResult, ProbeChange
from tinsmith.engine.training.loss_specs import SHADOW, SHADOW_SPEC
from tinsmith.errors import BadRequest

TRAIN, PROBE = 0, 1
"""Values of shadow_role."""
MAX_GROUP = 2**24
"""Group numbers are below this: inputs are float32, which holds integers up to here."""
MAX_DATA = 4096
"""Data of one request; the SDK sends at most 1,024."""
CHECKPOINT = "shadow/checkpoint"
"""Key that the service adds to loss_config: the id of the checkpoint that `shadow/at` names."""

_SPLIT = (
    "Send the train data of a group, then its probes, in one call. The SDK splits a call of more than 1,024 data or "
    "5 MB: split it yourself, between groups."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowSettings:
    """What a virtual step does. Of `adam`, `sgd` reads only the learning rate."""

    optimizer: str
    """sgd, adam (fresh moments) or adam_inherit (the model's moments)."""
    exact: bool
    adam: AdamParams


def shadow_settings(request: Pass) -> ShadowSettings:
    """The settings of a request, with defaults."""
    config = {key: value for key, value in SHADOW_SPEC.config.items() if value is not None} | dict(request.loss_config)
    names = ("beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    return ShadowSettings(
        optimizer=str(config.get("shadow/opt", SHADOW_SPEC.choices["shadow/opt"][0])),
        exact=config.get("shadow/mode", "exact") == "exact",
        adam=AdamParams(
            learning_rate=float(config["shadow/lr"]), **{name: float(config[f"shadow/{name}"]) for name in names}
        ),
    )


def check_groups(request: Pass) -> None:
    """Raises BadRequest unless every group has train data and, after them, probes.

    With this order, a group that the SDK split over two requests is always noticed: one part lacks probes, the other
    one train data.
    """
    if not request.forward_only:
        raise BadRequest("loss_fn 'shadow' changes nothing and has no gradient.", "Use forward, not forward_backward.")
    if len(request.data) > MAX_DATA:
        raise BadRequest(f"The request has {len(request.data)} data.", f"At most {MAX_DATA} with loss_fn 'shadow'.")
    if unread := _sgd_with_adam_settings(request):
        raise BadRequest(f"shadow/opt sgd does not read {', '.join(unread)}.", "Remove them, or use shadow/opt adam.")
    roles: dict[int, list[int]] = {}
    for index, datum in enumerate(request.data):
        roles.setdefault(_constant(index, datum, "shadow_group", MAX_GROUP), []).append(
            _constant(index, datum, "shadow_role", 2)
        )
    for group, members in roles.items():
        for role, name in ((TRAIN, "train data (shadow_role 0)"), (PROBE, "probes (shadow_role 1)")):
            if role not in members:
                raise BadRequest(f"shadow_group {group} has no {name} in this request.", _SPLIT)
        if members != sorted(members):
            raise BadRequest(f"shadow_group {group} has train data after a probe.", _SPLIT)


def _sgd_with_adam_settings(request: Pass) -> list[str]:
    keys = [key for key in SHADOW_SPEC.config if key in request.loss_config and key != "shadow/lr"]
    return keys if shadow_settings(request).optimizer == "sgd" else []


def _constant(index: int, datum: Datum, name: str, limit: int) -> int:
    """The value of an input whose values, one for each position or a single one, are all equal."""
    values = datum.inputs[name]
    value = float(values.flat[0])
    if not (values == value).all() or not (value.is_integer() and 0 <= value < limit):
        raise BadRequest(
            f"data[{index}].{name} is not one whole number from 0 to {limit - 1}.", "Repeat one number, or give [1]."
        )
    return int(value)


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """Train data, and the probes to compare before and after (indices of `ShadowPlan.probes`)."""

    train: tuple[Datum, ...]
    probes: list[int]

    @property
    def tokens(self) -> int:
        """Tokens to train on."""
        return sum(len(datum.tokens) for datum in self.train)


class ShadowPlan:
    """The distinct virtual steps and probes of a request, which `check_groups` accepts."""

    def __init__(self, request: Pass) -> None:
        self._data = request.data
        groups: dict[int, list[int]] = {}
        for index, datum in enumerate(request.data):
            groups.setdefault(int(datum.inputs["shadow_group"].flat[0]), []).append(index)
        self.group_count = len(groups)
        self.steps: list[VirtualStep] = []
        self.probes: list[Datum] = []
        self._place: dict[int, tuple[int, int]] = {}
        """For each datum: its step, and its index among the step's train data or among the plan's probes."""
        steps: dict[tuple[bytes, ...], int] = {}
        probes: dict[bytes, int] = {}
        for members in groups.values():
            train = [index for index in members if self._role(index) == TRAIN]
            number = steps.setdefault(tuple(_content(request.data[index]) for index in train), len(steps))
            if number == len(self.steps):
                self.steps.append(VirtualStep(tuple(_as_cross_entropy(request.data[index]) for index in train), []))
            self._place |= {index: (number, row) for row, index in enumerate(train)}
            for index in members[len(train) :]:
                probe = probes.setdefault(_content(request.data[index]), len(probes))
                if probe == len(self.probes):
                    self.probes.append(_as_cross_entropy(request.data[index]))
                if probe not in self.steps[number].probes:
                    self.steps[number].probes.append(probe)
                self._place[index] = (number, probe)
        self._steps_with: list[list[int]] = [[] for _ in self.probes]
        for number, step in enumerate(self.steps):
            for probe in step.probes:
                self._steps_with[probe].append(number)

    def steps_with(self, probe: int) -> list[int]:
        """Numbers of the steps that have a probe."""
        return self._steps_with[probe]

    def result(
        self,
        trained: Sequence[Sequence[np.ndarray]],
        before: Sequence[np.ndarray],
        changes: dict[tuple[int, int], ProbeChange],
    ) -> PassResult:
        """The result of the request.

        `trained` has the logprobs of each step's train data, `before` those of each probe, both before the step;
        `changes` has the change of each (step, probe).
        """
        logprobs, by_datum, loss, train_count = [], {}, 0.0, 0
        for index, datum in enumerate(self._data):
            number, row = self._place[index]
            if self._role(index) == PROBE:
                logprobs.append(before[row])
                by_datum[index] = changes[number, row]
            else:
                logprobs.append(trained[number][row])
                loss -= weighted_sum(_as_cross_entropy(datum), trained[number][row])
                train_count += 1
        metrics = {
            "loss:sum": loss,
            "shadow/groups:sum": float(self.group_count),
            "shadow/probes:sum": float(len(self._data) - train_count),
        }
        return PassResult(logprobs=tuple(logprobs), metrics=metrics, probes=by_datum)

    def _role(self, index: int) -> int:
        return int(self._data[index].inputs["shadow_role"].flat[0])


def weighted_sum(datum: Datum, values: np.ndarray) -> float:
    """sum w x of a datum, in float64."""
    return float((datum.inputs["weights"].astype(np.float64) * values).sum())


def cross_entropy_pass(name: str, data: Sequence[Datum], *, forward_only: bool) -> Pass:
    """A pass of these data with the loss -sum w p."""
    return Pass(model_id=name, data=tuple(data), loss_fn="cross_entropy", forward_only=forward_only)


def _as_cross_entropy(datum: Datum) -> Datum:
    weights = datum.inputs.get("weights", np.ones(datum.targets.shape, np.float32))
    return replace(datum, inputs={"weights": weights})


def _content(datum: Datum) -> bytes:
    """Equal for data with equal tokens, images, targets and weights."""
    parts = (datum.tokens, datum.targets, _as_cross_entropy(datum).inputs["weights"])
    arrays = [part.astype(part.dtype.newbyteorder("<"), copy=False).tobytes() for part in parts]
    return b"|".join([*arrays, *(f"{image.start} {image.size} ".encode() + image.data for image in datum.images)])


__all__ = [
    "CHECKPOINT", "SHADOW", "ShadowPlan", "ShadowSettings", "VirtualStep", "check_groups", "cross_entropy_pass",
    "shadow_settings", "weighted_sum",
]  # fmt: skip
