"""Checks whether a model is supported, from its config and modules; `loading` checks the rest by computing.

Rotary embeddings that depend on a row's length are those of `longrope`. Rope type `dynamic` changes them only beyond
`max_position_embeddings`, which is the longest row that is served.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tinsmith.engine.model.architectures import longrope
from tinsmith.engine.model.hybrid import gated_delta_net
from tinsmith.engine.model_parts import part_of, place
from tinsmith.errors import Unsupported

_FROZEN = {"q_b_proj", "kv_b_proj", "shared_expert_gate", "per_layer_input_gate", "per_layer_projection",
           "per_layer_model_projection"}  # fmt: skip
"""Linear modules of latent attention, of shared experts and of embeddings for each layer that are not adapted, but
computed on the fast path. Others, such as those of sparse indexers, may compute what a short probe does not show."""

TOKEN_TABLE = "embed_tokens_per_layer"
"""The embeddings that each layer of Gemma 4 reads beside its hidden states."""

LAYERS = {"full_attention", "sliding_attention"}
"""Supported values of transformers' `layer_types`."""

RECURRENT_LAYERS = {"linear_attention"}
"""The same for the models of `gated_delta_net`."""

EXPERT_LAYOUT = {"has_gate", "has_bias", "is_transposed", "is_concatenated"}
"""Beside `down_proj`, what transformers' interface for experts sets on a module that holds the experts of a layer."""

HINT = "Serve a model of the Llama, Qwen2, Qwen3, Qwen3.5 or Mistral family, dense or with experts."


DEFAULT_CONTEXT = 131072
"""Context length of a model whose config names none."""


def context_length(config: PreTrainedConfig) -> tuple[int, str]:
    """Length of the longest row that is computed exactly as the model defines it, and why it is less than the model's
    maximum, if it is."""
    config = config.get_text_config()
    settings = config.to_dict()
    names = ("max_position_embeddings", config.attribute_map.get("max_position_embeddings", ""), "model_max_length")
    maximum = next((int(settings[name]) for name in names if settings.get(name)), DEFAULT_CONTEXT)
    lengths = longrope.original_contexts(config, maximum)
    if len(lengths) <= 1:
        return maximum, ""
    return lengths[0], limit_of_longrope(maximum, lengths[0])


def limit_of_longrope(maximum: int, length: int) -> str:
    """Why a model is served up to `length`, where the change of its rotary embeddings beyond it is not computed."""
    return f"its maximum is {maximum}, but longrope changes all rotations of a row that is longer than {length}"


def original_context(config: PreTrainedConfig) -> int:
    """The length beyond which a row takes the long factors of longrope; 0 if none does."""
    config = config.get_text_config()
    return next(iter(longrope.original_contexts(config, context_length(config)[0])), 0)


def key_heads(text: PreTrainedConfig) -> tuple[int, int]:
    """Number and width of the key heads of a config with attention heads, but for latents."""
    values = text.to_dict()
    width = values.get("head_dim") or text.hidden_size // text.num_attention_heads
    return values.get("num_key_value_heads") or text.num_attention_heads, width


def check(source: str, model: PreTrainedModel) -> None:
    """Raises Unsupported for a model with unsupported features."""
    for fault in _faults(model):
        raise Unsupported(f"{source} ({model.config.model_type}) {fault}.", HINT)


def _faults(model: PreTrainedModel) -> Iterator[str]:
    settings = model.config.get_text_config().to_dict()
    recurrent = RECURRENT_LAYERS if model.config.model_type in gated_delta_net.MODEL_TYPES else set[str]()
    if others := set(settings.get("layer_types") or ()) - LAYERS - recurrent:
        yield f"has layers of {', '.join(sorted(others))}"
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        yield "has no linear output head"
    linear, others = _matrices(model)
    if others:
        yield f"has weights that no adapter covers, for example in MoE layers: {', '.join(sorted(others))}"
    if unknown := {leaf for name in linear if not part_of(name) and (leaf := name.rpartition(".")[2]) not in _FROZEN}:
        yield f"has the projections {', '.join(sorted(unknown))}"


def is_expert_stack(module: nn.Module) -> bool:
    """Whether a module holds the experts of a layer in a layout that `lora.experts` computes."""
    own = vars(module)
    # `dir` takes long and a start examines every module several times, so it comes second. Before transformers 5.20 no
    # experts have such a norm, nor the attribute.
    return own.keys() >= EXPERT_LAYOUT and "down_proj" in dir(module) and not own.get("has_post_expert_norm", False)


def is_experts_module(module: nn.Module) -> bool:
    """Whether a module holds the weights of a layer's experts, in any layout."""
    stacked = any(parameter.ndim > 2 for parameter in module.parameters(recurse=False))
    return is_expert_stack(module) or (stacked and "Experts" in type(module).__name__)


def _matrices(model: PreTrainedModel) -> tuple[set[str], set[str]]:
    """Paths of the body's linear modules, and of its matrices outside linear modules, embeddings and norms, without
    the numbers of layers."""
    linear, others, routers = set[str](), set[str](), list[str]()
    for path, module in model.base_model.named_modules():
        if f".{gated_delta_net.MIXER}." in f".{path}.":
            continue
        if path.endswith(TOKEN_TABLE) or path.startswith(tuple(routers)):
            continue
        if isinstance(module, nn.Linear):
            linear.add(place(path))
        elif type(module).__name__.endswith("Router"):
            routers.append(f"{path}.")
        elif is_expert_stack(module):
            continue
        elif module is not model.get_input_embeddings() and not type(module).__name__.endswith("Norm"):
            matrices = (name for name, weight in module.named_parameters(recurse=False) if weight.ndim > 1)
            others |= {f"{place(path)}.{name}" for name in matrices}
    return linear, others
