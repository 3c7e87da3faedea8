"""What a memory plan reads of a base model, computed from its config before any weight is read, and of a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from tinsmith.engine.base import LoraSpec
from tinsmith.engine.config import DEFAULT_MODEL, EngineConfig
from tinsmith.engine.images import tower
from tinsmith.engine.lora import targets
from tinsmith.engine.lora.grouped_adapters import on_device_with_grouped_products
from tinsmith.engine.memory_plan import STACK_BYTES, Gpu, ModelSizes, PlanSettings, Samples, VllmSettings
from tinsmith.engine.model import footprint, support
from tinsmith.engine.model.hybrid import gated_delta_net
from tinsmith.engine.model.sources import load_errors, locate
from tinsmith.engine_options import CPU_CACHE_TOKENS
from tinsmith.errors import ConfigError

DETERMINISTIC_TOKENS = 1024
"""Tokens of a micro-batch where they must not depend on free memory."""
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")
"""Names of this number in configs."""
EVERYTHING = LoraSpec(rank=1, seed=0)


def read_facts(config: EngineConfig, dtype: torch.dtype, *, config_only: bool = False) -> ModelSizes:
    """The facts of the model that the settings name, on a GPU. Raises ConfigError if it has no readable config.

    `config_only`: read nothing else of a model that is on the hub.
    """
    is_local = Path(config.source).expanduser().exists() or config.source == DEFAULT_MODEL
    folder = config.source if config_only and not is_local else locate(config.source).folder
    four_bit, recompute = config.quantize == "4bit", config.recompute == "always"
    with load_errors(config.source):
        settings = AutoConfig.from_pretrained(folder)
        with_tower = folder != config.source or is_local
        with_tower = with_tower and not four_bit and tower.processor_of(folder, settings) is not None
    return facts_of(config.source, settings, dtype, four_bit=four_bit, recompute=recompute, with_tower=with_tower)


def facts_of(
    source: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    four_bit: bool = False,
    recompute: bool = False,
    with_tower: bool = False,
) -> ModelSizes:
    """The facts of a model of this config on a GPU."""
    device = torch.device("cuda")
    text = config.get_text_config()
    model = tower.without_weights(config, dtype)
    whole = footprint.footprint_of(model, dtype, device, four_bit=False)
    size = footprint.footprint_of(model, dtype, device, four_bit=True) if four_bit else whole
    if with_tower:
        size = whole = footprint.footprint(config, dtype, device, four_bit=False, with_tower=True)
    reached = list(targets.targets(model))
    layers = text.num_hidden_layers
    saved = dtype.itemsize * sum(_kept_values(target, text) for target in reached)
    head = (text.hidden_size + text.vocab_size) if model.get_output_embeddings() is not None else 0
    body = layers * text.hidden_size * dtype.itemsize + saved / layers if recompute else saved
    return ModelSizes(
        source=source,
        weight_bytes=size.weights,
        loading_bytes=size.working,
        token_bytes=token_bytes(text, dtype),
        state_bytes=_state_bytes(text, dtype),
        activation_bytes=body + text.vocab_size * dtype.itemsize,
        layer_bytes=saved / layers,
        vocab_size=text.vocab_size,
        context_length=support.context_length(config)[0],
        parameters_per_rank=head + _parameters(reached, EVERYTHING),
        stack_bytes=STACK_BYTES if dtype == torch.bfloat16 else 0,
        layer_weight_bytes=dtype.itemsize * sum(_projection_size(target) for target in reached) // layers,
        decoded_layers=int(four_bit),
        layers=layers,
        vllm_weight_bytes=whole.weights + 4 * text.vocab_size * text.hidden_size,
        vllm_parameters_per_rank=head + _parameters(reached, replace(EVERYTHING, separate_experts=True)),
    )


def gpu_of(device: torch.device) -> Gpu:
    """A GPU; what this process's allocator has of it counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)
    return Gpu(
        name=torch.cuda.get_device_name(device),
        total_bytes=total,
        free_bytes=min(free, total),
        has_grouped_products=on_device_with_grouped_products(device),
    )


def gpu_here() -> Gpu:
    """This machine's GPU. Raises ConfigError if PyTorch finds none."""
    if not torch.cuda.is_available():
        raise ConfigError("PyTorch finds no GPU.", "Name one by its memory: tinsmith serve --plan --card 80GB.")
    return gpu_of(torch.device("cuda"))


def vllm_settings(config: EngineConfig) -> VllmSettings:
    """What the plan reads of an engine's settings of vLLM."""
    vllm = config.vllm
    return VllmSettings(
        rank=vllm.rank,
        adapters=vllm.adapters,
        memory=None if vllm.memory == "auto" else vllm.memory,
        context=None if vllm.context == "auto" else vllm.context,
        graphs="--enforce-eager" not in vllm.args,
        gpus=max(config.vllm_gpus, vllm.gpus),
        sleep=None if vllm.sleep == "auto" else vllm.sleep,
    )


def plan_settings(config: EngineConfig) -> PlanSettings:
    """What the plan reads of an engine's settings."""
    fixed = config.deterministic  # then nothing depends on the memory that happens to be free
    return PlanSettings(
        pass_tokens=_size(config.pass_tokens, DETERMINISTIC_TOKENS if fixed else None),
        cache_tokens=_size(config.cache_tokens, CPU_CACHE_TOKENS if fixed else None),
        model_bytes=config.model_memory,
        vllm=vllm_settings(config) if config.vllm_place == "beside" else None,
        engines=config.engines,
        trains=config.part != "sampling",
        samples=_samples(config),
        shards=config.shards,
    )


def _samples(config: EngineConfig) -> Samples:
    if config.shards > 1:
        return "none"
    if config.vllm_place != "none":
        return "questions"
    return "none" if config.part == "training" else "all"


def _size(setting: int | str, automatic: int | None) -> int | None:
    return automatic if isinstance(setting, str) else setting


def _parameters(reached: list[targets.Target], spec: LoraSpec) -> int:
    return sum(site.parameters_per_rank for site in targets.sites_for(reached, spec))


def _projection_size(target: targets.Target) -> int:
    """Weights of a projection; sharded models have no experts."""
    return target.inputs * target.outputs if isinstance(target, targets.LinearTarget) else 0


def _kept_values(target: targets.Target, text: PreTrainedConfig) -> int:
    """About the numbers that the backward of a token keeps at the modules of a target: inputs and outputs. A token
    visits some experts only."""
    if isinstance(target, targets.LinearTarget):
        return target.inputs + target.outputs
    visited = next((value for name in EXPERTS_OF_A_TOKEN if (value := text.to_dict().get(name))), 1)
    return visited * (2 * target.hidden + 3 * target.intermediate)


def token_bytes(text: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Keys and values of a token, or latents, in the attention layers."""
    values = text.to_dict()
    kinds = values.get("layer_types") or ["full_attention"] * text.num_hidden_layers
    layers = sum(kind.endswith("attention") and kind != "linear_attention" for kind in kinds)
    if values.get("kv_lora_rank"):
        return layers * (values["kv_lora_rank"] + values["qk_rope_head_dim"]) * dtype.itemsize
    heads, width = support.key_heads(text)
    width = max(width, values.get("global_head_dim") or 0)
    return layers * heads * 2 * width * dtype.itemsize


def _state_bytes(text: PreTrainedConfig, dtype: torch.dtype) -> int:
    """States of a sequence in recurrent layers."""
    if text.model_type not in gated_delta_net.MODEL_TYPES:
        return 0
    return gated_delta_net.shape_of(text).bytes(dtype)
