"""Validation of training requests: pure arithmetic on the records of `engine.base`, without torch.

The service calls these functions at submission, so that an invalid request is refused and never reaches an engine. The
inputs of each loss are listed in `training.loss_specs`; uploaded losses are checked in `custom_loss.graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tinsmith.engine.base import AdamParams, Datum, InputImage, LoraSpec, ModelCard, Pass
from tinsmith.engine.images.rows import image_mask, predicts_image
from tinsmith.engine.training.loss_specs import (
    CUSTOM,
    LOSSES,
    MASKS,
    ROUTER_REPLAY,
    SHADOW,
    SHADOW_SPEC,
    LossSpec,
    grad_mask,
)
from tinsmith.engine.training.shadow_plan import check_groups, shadow_settings
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.routed_experts import from_words
from tinsmith.settings import nearest_name

MAX_RANK = 512
_MIN_EPS = float(np.finfo(np.float32).tiny)
"""Smaller values are 0 or denormal in float32, the dtype of optimizer steps."""

_REFUSED_LOSSES = {
    "stable_reinforce": "Its objective is not published; use loss_fn=importance_sampling (or ppo, cispo) instead.",
}


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint with the most similar of `names`, or with all of them if none is similar."""
    names = sorted(names)
    if nearest := nearest_name(name, names):
        return f"Did you mean '{nearest}'?"
    return f"Known: {', '.join(names)}." if names else "There are none."


def check_lora(lora: LoraSpec) -> None:
    """Raises BadRequest unless an adapter of this spec can be created."""
    if not 1 <= lora.rank <= MAX_RANK:
        raise BadRequest(f"lora_config.rank is {lora.rank}.", f"Give a rank from 1 to {MAX_RANK}.")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise BadRequest(
            "lora_config trains no module.", "Set at least one of train_attn, train_mlp, train_unembed to true."
        )


def check_adam(adam: AdamParams, label: Callable[[str], str] = "adam_params.{}".format) -> None:
    """Raises BadRequest unless the parameters define an AdamW step. `label` is how a request names a field."""
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(adam, name)
        if not (np.isfinite(value) and value >= 0):
            raise BadRequest(f"{label(name)} is {value}.", "Give a finite number that is not negative.")
    if adam.eps < _MIN_EPS:
        raise BadRequest(
            f"{label('eps')} is {adam.eps}, but a step divides by eps where a gradient is 0.",
            f"Give at least {_MIN_EPS:.2g}; the SDK's default is 1e-12.",
        )
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(adam, name) < 1:
            raise BadRequest(f"{label(name)} is {getattr(adam, name)}.", "Give a number from 0 to below 1.")


def check_pass(request: Pass, card: ModelCard) -> None:
    """Raises BadRequest or Unsupported unless this base model can score every datum."""
    if hint := _REFUSED_LOSSES.get(request.loss_fn):
        raise Unsupported(f"loss_fn '{request.loss_fn}' is not supported.", hint)
    if not request.data:
        raise BadRequest("forward_backward has no data.", "Send at least one datum.")
    if request.loss_fn == CUSTOM:
        _check_custom(request, card)
        return
    spec = SHADOW_SPEC if request.loss_fn == SHADOW else LOSSES.get(request.loss_fn)
    if spec is None:
        raise BadRequest(
            f"There is no loss_fn '{request.loss_fn}'.", did_you_mean(request.loss_fn, [*LOSSES, CUSTOM, SHADOW])
        )
    _check_settings(request, spec)
    for index, datum in enumerate(request.data):
        where = f"data[{index}]"
        _check_tokens(where, datum, card)
        _check_inputs(where, datum, request, spec)
        _check_image_targets(where, datum, request)
    if request.loss_fn == SHADOW:
        check_groups(request)
        labels = {"learning_rate": "lr"}
        check_adam(shadow_settings(request).adam, lambda name: f"loss_fn_config.shadow/{labels.get(name, name)}")


def _check_custom(request: Pass, card: ModelCard) -> None:
    """The graph of the request's loss_id has already been looked up."""
    for key in request.loss_config:
        if key != "loss_id":
            raise BadRequest(f"loss_fn_config has no '{key}' for custom.", "An uploaded loss takes only its loss_id.")
    if request.graph is None:
        raise BadRequest("loss_fn 'custom' has no loss_id.", "Upload the loss with create_custom_loss first.")
    for index, datum in enumerate(request.data):
        _check_tokens(f"data[{index}]", datum, card)
        request.graph.check_inputs(f"data[{index}]", datum.targets, datum.inputs)


def _check_settings(request: Pass, spec: LossSpec) -> None:
    name = request.loss_fn
    for key, value in request.loss_config.items():
        _check_setting(name, key, value, spec)
    for key, default in spec.config.items():
        if default is None and key not in request.loss_config:
            raise BadRequest(f"{name} needs loss_fn_config['{key}'].", "It has no default.")
    if "kl_estimator" in request.loss_config and "kl_coef" not in request.loss_config:
        raise BadRequest("loss_fn_config.kl_estimator requires kl_coef.", "Give both or neither.")
    _check_ranges(name, request.loss_config)
    _check_bounds({**spec.config, **request.loss_config})


def _check_setting(loss_fn: str, key: str, value: float | str, spec: LossSpec) -> None:
    if choices := spec.choice_settings.get(key):
        if value not in choices:
            raise BadRequest(f"loss_fn_config.{key} is {value!r}.", f"Use one of {', '.join(sorted(choices))}.")
    elif key in spec.texts:
        if not isinstance(value, str):
            raise BadRequest(f"loss_fn_config.{key} is {value!r}.", "Give text.")
    elif key not in spec.numeric_settings:
        raise BadRequest(
            f"loss_fn_config has no '{key}' for {loss_fn}.",
            did_you_mean(key, [*spec.numeric_settings, *spec.choice_settings, *spec.texts]),
        )
    elif isinstance(value, str) or not np.isfinite(value):
        raise BadRequest(f"loss_fn_config.{key} is {value!r}.", "Give a finite number.")


def _check_bounds(config: Mapping[str, float | str | None]) -> None:
    """Check settings, with defaults, against each other."""
    for key in ("beta", "kl_coef"):
        if float(config.get(key) or 0) < 0:
            raise BadRequest(f"loss_fn_config.{key} is {config[key]}.", "Give 0 or more.")
    low, high = (float(config.get(f"clip_{side}_threshold") or 0) for side in ("low", "high"))
    if low > high:
        raise BadRequest(
            f"loss_fn_config.clip_low_threshold is {low}, above clip_high_threshold, {high}.",
            "They bound the ratio, for example 0.8 and 1.2.",
        )


def _check_ranges(name: str, config: Mapping[str, float | str]) -> None:
    if config.get("return_entropy", 0) not in (0, 1):
        raise BadRequest(f"loss_fn_config.return_entropy is {config['return_entropy']}.", "Give 0 or 1.")
    if config.get(ROUTER_REPLAY, 1) not in (0, 1):
        raise BadRequest(f"loss_fn_config.{ROUTER_REPLAY} is {config[ROUTER_REPLAY]}.", "Give 0 or 1.")
    dual_clip = float(config.get("dual_clip", 0))
    if dual_clip != 0 and not dual_clip > 1:
        raise BadRequest(
            f"loss_fn_config.dual_clip is {config['dual_clip']}.", "Give more than 1, or 0 to turn it off."
        )
    if name == "trinity_ppo":
        for key, least in (("num_total_datums", 1.0), ("clip_range", 0.0), ("clip_ratio_c", 1.0)):
            if float(config.get(key, least)) < least:
                raise BadRequest(f"loss_fn_config.{key} is {config[key]}.", f"Give at least {least:g}.")


def _check_tokens(where: str, datum: Datum, card: ModelCard) -> None:
    length = len(datum.tokens)
    if length == 0:
        raise BadRequest(f"{where}.model_input is empty.", "Give at least one token.")
    if length > card.context_length:
        raise BadRequest(
            f"{where}.model_input has {length} tokens; the context length of {card.source} is {context_of(card)}.",
            "Shorten the sequence.",
        )
    check_input(f"{where}.model_input", datum.tokens, datum.images, card)
    if datum.targets.ndim not in (1, 2) or len(datum.targets) != length or datum.targets.size == 0:
        raise BadRequest(
            f"{where}: target_tokens has shape {datum.targets.shape}, model_input has {length} tokens.",
            "Give (N,) or (N, K) targets for N tokens; target i follows token i (already shifted).",
        )
    if datum.targets.ndim == 2 and datum.targets.shape[1] > card.vocab_size:
        raise BadRequest(
            f"{where}.target_tokens has {datum.targets.shape[1]} targets for each position; {card.source} has "
            f"{card.vocab_size} tokens.",
            "Name each token at most once.",
        )
    check_ids(f"{where}.target_tokens", datum.targets, card)
    _check_routed_experts(where, datum, card)


def _check_routed_experts(where: str, datum: Datum, card: ModelCard) -> None:
    if datum.routed_experts is None:
        return
    if card.router is None:
        raise Unsupported(f"{where}: {card.source} replays no routed_experts: {unrouted(card)}.", "Remove the input.")
    rows, tokens = len(datum.routed_experts), len(datum.tokens)
    if rows != tokens:
        raise BadRequest(
            f"{where}: routed_experts has {rows} rows, model_input has {tokens} tokens.",
            "Give one row for each token of model_input.",
        )
    try:
        from_words(datum.routed_experts, card.router)
    except ValueError as error:
        raise BadRequest(
            f"{where}: routed_experts {error}.", "Send what the sampler of this model recorded."
        ) from error


def unrouted(card: ModelCard) -> str:
    """Why the model has no routers whose choices can be recorded and replayed."""
    return "it is served on the general path" if card.path == "general" else "it is not a mixture of experts"


def _check_inputs(where: str, datum: Datum, request: Pass, spec: LossSpec) -> None:
    loss_fn, config = request.loss_fn, request.loss_config
    if datum.targets.ndim == 2 and loss_fn != "cross_entropy":
        raise BadRequest(
            f"{where}: {loss_fn} takes one target per position, got shape {datum.targets.shape}.",
            "Only cross_entropy takes (N, K) targets.",
        )
    required = (*spec.required, *(("ref_logprobs",) if config.get("kl_coef") else ()))
    for name in required:
        if name not in datum.inputs:
            raise BadRequest(f"{where}: {loss_fn} needs loss_fn_inputs['{name}'].", f"Inputs: {_inputs_of(spec)}.")
    for name, values in datum.inputs.items():
        if name not in spec.inputs:
            raise BadRequest(
                f"{where}: {loss_fn} does not read loss_fn_inputs['{name}'].",
                f"Remove it. Inputs: {_inputs_of(spec)}.",
            )
        if (setting := spec.inputs[name]) and setting not in config:
            raise BadRequest(f"{where}: {name} requires loss_fn_config['{setting}'].", "Give both or neither.")
        _check_values(where, name, values, datum)
    if datum.targets.ndim == 2 and "kl_coef" in config:
        raise BadRequest(f"{where}: kl_coef takes one target per position.", "Remove it for (N, K) targets.")
    if loss_fn == "trinity_ppo" and not np.isin(datum.inputs["weights"], (0, 1)).all():
        raise BadRequest(f"{where}: weights of trinity_ppo are a mask.", "Give only 0 and 1.")


def _check_values(where: str, name: str, values: np.ndarray, datum: Datum) -> None:
    shape = datum.tokens.shape if name in MASKS else datum.targets.shape
    if values.shape != shape and not (name in SHADOW_SPEC.required and values.shape == (1,)):
        reference = "model_input" if name in MASKS else "target_tokens"
        raise BadRequest(
            f"{where}: {name} has shape {values.shape}, {reference} has {shape}.", "Give both the same shape."
        )
    if not np.isfinite(values).all():
        raise BadRequest(f"{where}: {name} contains NaN or infinity.", "Give finite numbers.")


def context_of(card: ModelCard) -> str:
    """The context length, with the reason if it is not the model's maximum."""
    return f"{card.context_length} ({card.context_limit})" if card.context_limit else str(card.context_length)


def check_input(where: str, tokens: np.ndarray, images: Sequence[InputImage], card: ModelCard) -> None:
    """Check the tokens of a sequence, and that the model takes its images."""
    if images and card.images is None:
        raise Unsupported(
            f"{where} holds a chunk of type image, and {card.source} takes no images.",
            "Send encoded_text chunks only, or serve a vision-language model.",
        )
    check_ids(where, tokens[~image_mask(len(tokens), images)] if images else tokens, card)


def _check_image_targets(where: str, datum: Datum, request: Pass) -> None:
    """Check that no target which is an image's token counts: such logprobs mean nothing."""
    if datum.images and (grad_mask(replace(request, forward_only=False), datum) & predicts_image(datum)).any():
        raise BadRequest(
            f"{where}: {request.loss_fn} counts a target that is a token of an image.",
            "Set weights, advantages or masks to 0 where the next token is an image's.",
        )


def check_ids(where: str, ids: np.ndarray, card: ModelCard) -> None:
    """Check that the token ids are in the model's vocabulary."""
    if ids.size and not (ids.min() >= 0 and ids.max() < card.vocab_size):
        invalid = ids[(ids < 0) | (ids >= card.vocab_size)].flat[0]
        raise BadRequest(
            f"{where} contains token id {invalid}; {card.source} has {card.vocab_size} tokens.",
            "Use the tokenizer of this model.",
        )


def _inputs_of(spec: LossSpec) -> str:
    optional = [
        f"{name} ({f'with {setting}' if setting else 'optional'})"
        for name, setting in spec.inputs.items()
        if name not in spec.required
    ]
    return ", ".join(("target_tokens", *spec.required, *optional))
