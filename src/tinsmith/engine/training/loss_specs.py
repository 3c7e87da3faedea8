"""The table of losses: what each reads and may be told, its defaults, and the terms that can be added to it.

Pure arithmetic on the records of `engine.base`: the service refuses from here what is not in order, and engines take
defaults and masks from here. Semantics are the public Tinker documentation's; where that is silent the value is ours
and the note says so. `trinity_ppo`, the entropy term and the KL term are extensions of this server.

Left out: the formulas (`losses`), and uploaded losses (`graph`), which read what their graph names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tinsmith.engine.base import Datum, Pass

Term = Literal["entropy", "kl"]

CUSTOM = "custom"
"""The loss_fn of uploaded losses; `loss_id` in its loss_fn_config says which."""
ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """Inputs a loss needs, inputs it may have, and its settings with their defaults (None: it must be given)."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    config: Mapping[str, float | None] = field(default_factory=dict)
    token_mask: str = "advantages"
    """The input that says by not being 0 which positions count."""
    terms: tuple[Term, ...] = ("entropy", "kl")

    @property
    def numeric_settings(self) -> Mapping[str, float | None]:
        """Every numeric setting, those of its terms included."""
        return {**self.config, **{key: 0.0 for term in self.terms for key in _TERM_SETTINGS[term]}}

    @property
    def choice_settings(self) -> Mapping[str, tuple[str, ...]]:
        """Every setting that is one of several words; the first is the default."""
        return {"kl_estimator": ("k2", "k1", "k3")} if "kl" in self.terms else {}

    @property
    def inputs(self) -> Mapping[str, str]:
        """Every input it may have -> the setting that must be given along with it, or nothing."""
        own = dict.fromkeys((*self.required, *self.optional), "")
        return {**{name: key for term in self.terms for name, key in _TERM_INPUTS[term].items()}, **own}


_TERM_SETTINGS: Mapping[Term, tuple[str, ...]] = {"entropy": ("entropy_coef", "return_entropy"), "kl": ("kl_coef",)}
_TERM_INPUTS: Mapping[Term, Mapping[str, str]] = {
    "entropy": {"entropy_mask": "entropy_coef"},
    "kl": {"ref_logprobs": "kl_coef", "kl_mask": "kl_coef"},
}

MASKS = ("entropy_mask", "kl_mask")
"""Inputs with one number for each position, also where a position has several targets."""

_RL = ("logprobs", "advantages")
_CLIPS = ("clip_low_threshold", "clip_high_threshold")

LOSSES: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec(optional=("weights",), token_mask="weights"),
    "importance_sampling": LossSpec(required=_RL),
    "ppo": LossSpec(
        required=_RL,
        optional=_CLIPS,
        config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "dual_clip": 0.0},
    ),
    "cispo": LossSpec(required=_RL, optional=_CLIPS, config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    # beta has no published default: 0.05 is the documentation's example.
    "dro": LossSpec(required=_RL, config={"beta": 0.05}),
    # The clips have no published default: these are the GSPO paper's (arXiv 2507.18071), 3e-4 below and 4e-4 above 1.
    "gspo": LossSpec(
        required=(*_RL, "sequence_ratio_mask"),
        optional=_CLIPS,
        config={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    ),
    # Its kl_coef is its own: always k2, inside the mean over a datum's tokens.
    "trinity_ppo": LossSpec(
        required=("weights", *_RL),
        optional=("ref_logprobs",),
        config={"clip_range": 0.2, "clip_ratio_c": 3.0, "kl_coef": 0.0, "num_total_datums": None},
        token_mask="weights",
        terms=("entropy",),
    ),
}

EXTENSIONS: Mapping[str, tuple[str, ...]] = {
    "loss_fn": ("trinity_ppo",),
    "loss_fn_config": ("entropy_coef", "return_entropy", "kl_coef", "kl_estimator", "dual_clip"),
    "loss_fn_inputs": ("entropy_mask", "ref_logprobs", "kl_mask"),
    "loss_fn_outputs": ("entropy",),
}
"""What this server adds to the protocol, by where it goes."""


def numeric_settings(request: Pass) -> dict[str, float]:
    """The numeric settings of a request that is in order: what it gives, else the defaults."""
    spec = LOSSES[request.loss_fn]
    given = {key: value for key, value in request.loss_config.items() if not isinstance(value, str)}
    return {**{key: value for key, value in spec.numeric_settings.items() if value is not None}, **given}


def kl_estimator(request: Pass) -> str:
    """Which estimate of the KL divergence its term takes."""
    return str(request.loss_config.get("kl_estimator", "k2"))


def needs_entropy(request: Pass) -> bool:
    """Whether anything of the answer depends on the entropies: a coefficient of 0 is there to see their sum."""
    return "entropy_coef" in request.loss_config or bool(request.loss_config.get("return_entropy"))


def loss_inputs(request: Pass, datum: Datum) -> dict[str, np.ndarray]:
    """Every input that the loss and its terms read, of one datum, flat; what it leaves out has its default."""
    spec, config = LOSSES[request.loss_fn], request.loss_config
    found = {name: datum.inputs[name] for name in spec.required}
    for name in spec.optional:
        default = {**spec.config, **config}.get(name, 0.0 if name == "ref_logprobs" else 1.0)
        found[name] = datum.inputs.get(name, np.full(datum.targets.shape, default))
    if "entropy_coef" in config:
        found["entropy_mask"] = _mask(request, datum, "entropy_mask")
    if "kl" in spec.terms and "kl_coef" in config:
        given = "ref_logprobs" in datum.inputs
        found["ref_logprobs"] = datum.inputs.get("ref_logprobs", np.zeros(datum.targets.shape))
        found["kl_mask"] = _mask(request, datum, "kl_mask") if given else np.zeros(len(datum.tokens))
    return {name: values.reshape(-1) for name, values in found.items()}


def grad_mask(request: Pass, datum: Datum) -> np.ndarray:
    """bool [N]: the positions that a gradient may come from; elsewhere it is 0 for sure."""
    if request.forward_only:
        return np.zeros(len(datum.tokens), bool)
    if request.loss_fn == CUSTOM:
        return np.ones(len(datum.tokens), bool)
    found = _token_mask(request, datum)
    if request.loss_fn == "dro":
        found |= datum.inputs["logprobs"] != 0
    if request.loss_config.get("entropy_coef"):
        found |= _mask(request, datum, "entropy_mask") != 0
    if "kl" in LOSSES[request.loss_fn].terms and request.loss_config.get("kl_coef"):
        found |= _mask(request, datum, "kl_mask") != 0
    return found


def _mask(request: Pass, datum: Datum, name: str) -> np.ndarray:
    """A term's mask [N]: the datum's own, else 1 at the positions that count for the loss."""
    own = datum.inputs.get(name)
    return own if own is not None else _token_mask(request, datum).astype(np.float32)


def _token_mask(request: Pass, datum: Datum) -> np.ndarray:
    """bool [N]: where the loss's weight or advantage is not 0, for any of the position's targets."""
    values = datum.inputs.get(LOSSES[request.loss_fn].token_mask, np.ones(datum.targets.shape))
    return (values != 0).reshape(len(datum.tokens), -1).any(axis=1)
