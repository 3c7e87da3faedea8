"""The table of losses: inputs, settings and defaults of each, and the terms that can be added to it.

Pure arithmetic on the records of `engine.base`. The service validates requests with this table, and engines take
defaults and masks from it. Semantics follow the public Tinker documentation; where that is silent, a comment explains
the choice made here. `trinity_ppo`, the entropy term and the KL term are extensions of this server. The formulas are in
`losses`, uploaded losses in `custom_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tinsmith.engine.base import Datum, Pass

Term = Literal["entropy", "kl"]

CUSTOM = "custom"
"""The loss_fn of uploaded losses; `loss_id` in its loss_fn_config names the loss."""
ESTIMATORS = ("k1", "k2", "k3")
ROUTED_EXPERTS = "routed_experts"
"""The input that holds the experts which the sampler routed a datum's tokens to, with any loss."""
ROUTER_REPLAY = "router_replay"
"""The setting of any loss that says whether these experts are replayed (1) or only compared (0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """Required and optional inputs of a loss, and its numeric settings with defaults (None: no default)."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    config: Mapping[str, float | None] = field(default_factory=dict)
    token_mask: str = "advantages"
    """The input that is not 0 at the tokens that the loss counts."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Settings with a list of choices; the first is the default."""
    texts: tuple[str, ...] = ()
    """Settings that are free text."""
    terms: tuple[Term, ...] = ("entropy", "kl")

    @property
    def numeric_settings(self) -> Mapping[str, float | None]:
        """Every numeric setting, including those of its terms."""
        own = {**self.config, **{key: 0.0 for term in self.terms for key in _TERM_SETTINGS[term]}}
        return own if self is SHADOW_SPEC else {**own, ROUTER_REPLAY: 1.0}

    @property
    def choice_settings(self) -> Mapping[str, tuple[str, ...]]:
        """Every setting with a list of choices, including those of its terms."""
        return {**self.choices, **({"kl_estimator": ("k2", "k1", "k3")} if "kl" in self.terms else {})}

    @property
    def inputs(self) -> Mapping[str, str]:
        """Every possible input -> the setting that the input requires, or an empty string."""
        own = dict.fromkeys((*self.required, *self.optional), "")
        return {**{name: key for term in self.terms for name, key in _TERM_INPUTS[term].items()}, **own}


_TERM_SETTINGS: Mapping[Term, tuple[str, ...]] = {"entropy": ("entropy_coef", "return_entropy"), "kl": ("kl_coef",)}
_TERM_INPUTS: Mapping[Term, Mapping[str, str]] = {
    "entropy": {"entropy_mask": "entropy_coef"},
    "kl": {"ref_logprobs": "kl_coef", "kl_mask": "kl_coef"},
}

MASKS = ("entropy_mask", "kl_mask")
"""Inputs with one value per position, even if a position has several targets."""

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
    # Its kl_coef is separate from the KL term: always k2, inside the mean over a datum's tokens.
    "trinity_ppo": LossSpec(
        required=("weights", *_RL),
        optional=("ref_logprobs",),
        config={"clip_range": 0.2, "clip_ratio_c": 3.0, "kl_coef": 0.0, "num_total_datums": None},
        token_mask="weights",
        terms=("entropy",),
    ),
}

SHADOW = "shadow"
"""The loss_fn of virtual optimizer steps (`shadow_plan`): forward only, without an effect on the model."""
SHADOW_SPEC = LossSpec(
    required=("shadow_group", "shadow_role"),
    optional=("weights",),
    config={
        "shadow/lr": None,
        "shadow/beta1": 0.9,
        "shadow/beta2": 0.95,
        "shadow/eps": 1e-12,
        "shadow/weight_decay": 0.0,
        "shadow/grad_clip_norm": 0.0,
    },
    token_mask="weights",
    choices={"shadow/opt": ("sgd", "adam", "adam_inherit"), "shadow/mode": ("exact", "first_order")},
    texts=("shadow/at",),
    terms=(),
)

EXTENSIONS: Mapping[str, tuple[str, ...]] = {
    "loss_fn": ("trinity_ppo", SHADOW),
    "loss_fn_config": (
        "entropy_coef",
        "return_entropy",
        "kl_coef",
        "kl_estimator",
        "dual_clip",
        ROUTER_REPLAY,
        *SHADOW_SPEC.config,
        *SHADOW_SPEC.choices,
        *SHADOW_SPEC.texts,
    ),
    "loss_fn_inputs": ("entropy_mask", "ref_logprobs", "kl_mask", ROUTED_EXPERTS, *SHADOW_SPEC.required),
    "loss_fn_outputs": ("entropy", "logprobs_pre", "logprobs_post", "delta"),
}
"""Names that this server adds to the protocol, by field."""


def numeric_settings(request: Pass) -> dict[str, float]:
    """The numeric settings of a valid request, with defaults."""
    spec = LOSSES[request.loss_fn]
    defaults = {key: value for key, value in spec.numeric_settings.items() if value is not None}
    return {**defaults, **{key: value for key, value in request.loss_config.items() if not isinstance(value, str)}}


def kl_estimator(request: Pass) -> str:
    """The estimator of the KL term."""
    return str(request.loss_config.get("kl_estimator", "k2"))


def needs_entropy(request: Pass) -> bool:
    """Whether the result depends on entropies; with a coefficient of 0, their sum is still a metric."""
    return "entropy_coef" in request.loss_config or bool(request.loss_config.get("return_entropy"))


def loss_inputs(request: Pass, datum: Datum) -> dict[str, np.ndarray]:
    """Every input that the loss and its terms read, flat, with defaults for missing inputs."""
    spec, config = LOSSES[request.loss_fn], request.loss_config
    inputs = {name: datum.inputs[name] for name in spec.required}
    for name in spec.optional:
        default = {**spec.config, **config}.get(name, 0.0 if name == "ref_logprobs" else 1.0)
        inputs[name] = datum.inputs.get(name, np.full(datum.targets.shape, default))
    if "entropy_coef" in config:
        inputs["entropy_mask"] = _mask(request, datum, "entropy_mask")
    if "kl" in spec.terms and "kl_coef" in config:
        has_reference = "ref_logprobs" in datum.inputs
        inputs["ref_logprobs"] = datum.inputs.get("ref_logprobs", np.zeros(datum.targets.shape))
        inputs["kl_mask"] = _mask(request, datum, "kl_mask") if has_reference else np.zeros(len(datum.tokens))
    return {name: values.reshape(-1) for name, values in inputs.items()}


def grad_mask(request: Pass, datum: Datum) -> np.ndarray:
    """bool [N]: positions that may have a gradient; at all others it is certainly 0."""
    if request.forward_only:
        return np.zeros(len(datum.tokens), bool)
    if request.loss_fn == CUSTOM:
        return np.ones(len(datum.tokens), bool)
    mask = _token_mask(request, datum)
    if request.loss_fn == "dro":
        mask |= datum.inputs["logprobs"] != 0
    if request.loss_config.get("entropy_coef"):
        mask |= _mask(request, datum, "entropy_mask") != 0
    if request.loss_config.get("kl_coef") and "kl" in LOSSES[request.loss_fn].terms:
        mask |= _mask(request, datum, "kl_mask") != 0
    return mask


def _mask(request: Pass, datum: Datum, name: str) -> np.ndarray:
    """A term's mask [N]: the datum's own, else 1 at the positions that the loss counts."""
    own = datum.inputs.get(name)
    return own if own is not None else _token_mask(request, datum).astype(np.float32)


def _token_mask(request: Pass, datum: Datum) -> np.ndarray:
    """bool [N]: positions where the weight or advantage of any target is not 0."""
    spec = SHADOW_SPEC if request.loss_fn == SHADOW else LOSSES[request.loss_fn]
    values = datum.inputs.get(spec.token_mask, np.ones(datum.targets.shape))
    return (values != 0).reshape(len(datum.tokens), -1).any(axis=1)
