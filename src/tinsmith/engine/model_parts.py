"""Which part of a model a module belongs to, by its path in transformers' module tree.

    attn      projections of a token mixer that read from or write to the residual stream
    mlp       projections of dense MLPs, of shared experts and of routed experts
    unembed   the output head

The rules are an allow-list by the names of a module and of its parent, because whether a linear module is a projection,
a router or a gate decides what is trained. Linear modules that are not adapted keep their own code: routers, gates of
one value a head, low-rank factors whose latents stay shared, indexers, encoders of images and audio.

Imports no torch: the API process reads the parts of an imported adapter from the names of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Part = Literal["attn", "mlp"]

HEAD = "lm_head"
PARTS = ("attn", "mlp", "unembed")

_ATTENTION_PARENTS = {
    "self_attn", "attn", "attention", "self_attention", "linear_attn", "mixer", "mamba", "conv", "temporal_block",
    "qkv_proj",
}  # fmt: skip
_ATTENTION = {
    "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "dense", "qkv_proj", "query_key_value", "c_attn", "c_proj",
    "kv_proj", "q_a_proj", "kv_a_proj_with_mqa", "o_b_proj", "r_proj", "gate_proj", "g_proj", "output_gate",
    "q_gate_proj", "v_proj_current", "v_proj_delayed", "linear_x", "linear_y", "linear_out",
    "in_proj", "in_proj_q", "in_proj_k", "in_proj_v", "in_proj_qkv", "in_proj_qkvz", "in_proj_z",
}  # fmt: skip
_ROW_SLICES = {"in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"}
_MAMBA_SLICES = {"gate_proj", "x_proj"}
_MLP_PARENTS = {
    "mlp", "mlps", "feed_forward", "shared_expert", "shared_experts", "shared_mlp", "mlp_block", "mixer", "ffn",
    "layers",
}  # fmt: skip
_MLP = {
    "gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "fc_in", "fc_out", "c_fc", "c_proj",
    "dense_h_to_4h", "dense_4h_to_h", "w1", "w2", "w3", "input_linear", "output_linear", "fc1_latent_proj",
    "fc2_latent_proj",
}  # fmt: skip
_NOT_ADAPTED_PARENTS = {
    "router_mlp", "gate", "forget_gate", "indexer", "scorer", "compressor", "k_sconv", "v_sconv", "altup",
    "laurel",
}  # fmt: skip
_NOT_ADAPTED = {
    "router", "gate", "wg", "classifier", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba", "a_proj",
    "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "q_b_proj", "kv_b_proj", "o_a_proj", "x_proj", "dt_proj",
    "sink_proj", "weight_proj", "weights_proj", "wq_b", "wk", "per_layer_input_gate", "per_layer_projection",
    "per_layer_model_projection", "altup_projections", "altup_unembed_projections",
    "gate_up_proj_adapter_list", "linear_q_adapter_list", "linear_k_adapter_list", "linear_v_adapter_list",
}  # fmt: skip
_NOT_ADAPTED_PATHS = {"layers.linear"}
"""Parents and names: zamba2's projection between its shared block and a Mamba layer."""
_EXPERT_SITES = {"w1", "w2", "w3"}
_ENCODERS = {
    "visual", "vision_tower", "vision_model", "audio_tower", "audio_model", "multi_modal_projector", "embed_vision",
    "embed_audio", "vision_embedder", "audio_embedder", "embed_tokens_extend",
}  # fmt: skip


def part_of(name: str) -> Part | Literal[""] | None:
    """The part that a linear module belongs to by its path; "" if it is not adapted, None if no rule names it."""
    names = ["", "", *(piece for piece in name.split(".") if not piece.isdigit())]
    parent, leaf = names[-2], names[-1]
    if (
        "router" in names[:-1]
        or parent in _NOT_ADAPTED_PARENTS
        or leaf in _NOT_ADAPTED
        or f"{parent}.{leaf}" in _NOT_ADAPTED_PATHS
    ):
        return ""
    if parent in _MLP_PARENTS and leaf in _MLP:
        return "mlp"
    return "attn" if parent in _ATTENTION_PARENTS and leaf in _ATTENTION else None


def part_of_site(name: str) -> Part | None:
    """The part that a site of an adapter belongs to; None for a name that no site has."""
    parent, _, leaf = name.rpartition(".")
    if parent.rpartition(".")[2] == "experts":
        return "mlp" if leaf in _EXPERT_SITES else None
    return "attn" if is_row_slice(name) else part_of(name) or None


def parts_of_sites(names: Iterable[str]) -> set[str]:
    """The parts that these sites belong to, the head included; empty if one of them is no site."""
    parts = {"unembed" if name == HEAD else part_of_site(name) or "" for name in names}
    return set() if "" in parts else parts


def is_row_slice(name: str) -> bool:
    """Whether a site is a slice of the rows of a projection that transformers fuses."""
    *_, parent, leaf = ["", "", *name.split(".")]
    return (parent == "linear_attn" and leaf in _ROW_SLICES) or (parent in ("mixer", "mamba") and leaf in _MAMBA_SLICES)


def is_in_experts(name: str) -> bool:
    """Whether a module belongs to a stack of routed experts, or is the stack."""
    return "experts" in name.split(".")


def is_in_encoder(name: str) -> bool:
    """Whether a module belongs to an encoder of images or audio."""
    return bool(_ENCODERS & set(name.split(".")))


def place(name: str) -> str:
    """A module's path without its layer's number."""
    return ".".join(piece for piece in name.split(".") if not piece.isdigit())
