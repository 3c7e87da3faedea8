"""Loads a base model through transformers' own model code.

Weights are mapped from safetensors files or converted from them tensor by tensor, directly to the device, so that no
second copy of the model is in memory; `footprint` refuses beforehand what does not fit.

Supported are causal language models whose layers are attention, also over latents (MLA), or Gated DeltaNet (Qwen3.5),
and a gated MLP or a mixture of experts (Llama, Qwen, Mistral, Mixtral, gpt-oss, DeepSeek and relatives): `support`
checks config and modules, `self_check` computes. Not supported: mixtures outside transformers' interface for experts.
`quantization` says which quantized weights are; `sources` locates the files; `images.tower` takes images.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tinsmith.engine.base import ModelCard
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.cpu.arguments import has_loops
from tinsmith.engine.cpu.compiling import Compilation
from tinsmith.engine.cpu.instructions import cpu_bfloat16, kind_of, panel_kind
from tinsmith.engine.images import tower
from tinsmith.engine.images.tower import VisionTower
from tinsmith.engine.load_checks import LoadChecks, checks_of
from tinsmith.engine.model import attention, footprint, precision, quantization, self_check, support
from tinsmith.engine.model.architectures import latents, longrope
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.hybrid import gated_delta_net
from tinsmith.engine.model.memory import total_bytes
from tinsmith.engine.model.mixture import routing
from tinsmith.engine.model.sources import load_errors, locate
from tinsmith.errors import ConfigError

log = logging.getLogger(__name__)

FLOAT32_MEMORY_SHARE = 8
"""Where a CPU multiplies float32 faster than bfloat16, `dtype: auto` takes float32 for models whose weights then take
at most one part in this many of the memory: products use two more copies of them."""


class LoadedModel(NamedTuple):
    """A model as it was read."""

    model: PreTrainedModel
    tokenizer: Any
    source: str
    tokenizer_source: str
    vision: VisionTower | None = None
    checks: LoadChecks | None = None


def load(config: EngineConfig) -> BaseModel:
    """Load the model for the fast path. Raises ConfigError if it cannot be loaded, Unsupported if it is not
    supported."""
    return prepare(read(config))


def read(config: EngineConfig) -> LoadedModel:
    """Read a model's files. Raises ConfigError."""
    device = device_of(config.device)
    likely, compilation = dtype_of(config.dtype, device), Compilation()  # while files are fetched, converted and read
    has_compiled = config.path != "general" and has_loops(device, likely)
    if has_compiled:
        compilation.start_ahead(kind_of(likely), panels=panel_kind(device, likely) is not None)
    located = locate(config.source)
    if not sys.stderr.isatty():  # progress bars clutter a log
        disable_progress_bar()
    with load_errors(config.source):
        tokenizer = AutoTokenizer.from_pretrained(located.folder)
        settings = AutoConfig.from_pretrained(located.folder)
        dtype = dtype_of(config.dtype, device, settings)
        text = settings.get_text_config()
        if has_compiled and {"num_attention_heads", "hidden_size"} <= text.to_dict().keys():
            heads, width = support.key_heads(text)
            compilation.start_decoding(kind_of(dtype), text.num_attention_heads // heads, width)
        # A tower in 4-bit blocks, or one without the files of its processor, stays unused.
        processor = None if config.quantize == "4bit" else tower.processor_of(located.folder, settings)
    options = quantization.load_options(config.source, settings, config.quantize, device, dtype)
    scarce = False
    if config.check_memory:
        free = footprint.device_free_bytes(device)
        four_bit, with_tower = config.quantize == "4bit", processor is not None
        needed = footprint.check(
            config.source, settings, dtype, device, four_bit=four_bit, free=free, with_tower=with_tower
        )
        scarce = 2 * needed.peak > free
    if device.type != "cpu":
        options["device_map"] = {"": device}
    with load_errors(config.source), _one_tensor_at_a_time(scarce):
        auto = AutoModelForImageTextToText if processor is not None else tower.auto_class(settings)
        model = auto.from_pretrained(located.folder, dtype=dtype, attn_implementation="eager", **options)
        quantization.keep_blocks(model)
        vision = None
        if auto is AutoModelForImageTextToText:
            model, vision = tower.detach(model, processor)
    compilation.wait()
    chosen = config.model_copy(update={"dtype": precision.dtype_name(dtype)})
    checks = checks_of(chosen, Path(located.folder), compilation) if device.type == "cpu" else None
    return LoadedModel(model, tokenizer, config.source, located.tokenizer, vision if processor else None, checks)


@contextmanager
def _one_tensor_at_a_time(scarce: bool) -> Iterator[None]:
    """Where memory is scarce, have transformers read the tensors one after the other within the context.

    Its threads read ahead of the main thread, which fuses a checkpoint's experts: up to all of them twice. It takes
    this setting from the environment only.
    """
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    previous = os.environ.get(name)
    if scarce:
        os.environ[name] = "1"
    try:
        yield
    finally:
        if scarce:
            os.environ.pop(name)
        if previous is not None:
            os.environ[name] = previous


def prepare(loaded: LoadedModel) -> BaseModel:
    """Freeze and check a model with eager attention. Raises Unsupported if it is not supported."""
    model, tokenizer, source, tokenizer_source, vision, checks = loaded
    model.eval().requires_grad_(False)
    precision.set_matmul_precision(model.dtype)
    support.check(source, model)
    recurrent = gated_delta_net.install(model)
    card = card_of(source, tokenizer_source, model, tokenizer)
    longrope.install(source, model, card.original_context)
    if vision is not None:
        card = replace(card, images=vision.support, weight_bytes=card.weight_bytes + vision.weight_bytes)
    body = dict(model.base_model.named_children()).get("language_model", model.base_model)
    base = BaseModel(
        card=card,
        model=model,
        body=body,
        tokenizer=tokenizer,
        recurrent=recurrent,
        latent_width=latents.install(model, attention.NAME),
        vision=vision,
        checks=checks or LoadChecks(),
        per_layer_embeddings=support.TOKEN_TABLE in dict(body.named_children()),
    )
    base = self_check.with_compiled_attention(self_check.with_flex_attention(base))
    self_check.check(base)
    gated_delta_net.drop_originals(model)
    shared = routing.install(model)
    card = replace(base.card, router=shared.shape)
    return replace(base, routing=shared, card=card, uniform_kv=self_check.kv_shape(base))


def device_of(setting: str) -> torch.device:
    """The device that a setting names. Raises ConfigError for a GPU that is not there."""
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "Device cuda is requested, but PyTorch finds no GPU.", "Install a CUDA build of torch, or use cpu."
        )
    return torch.device("cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu")


def dtype_of(setting: str, device: torch.device, settings: PreTrainedConfig | None = None) -> torch.dtype:
    """The data type that a setting names for a model of these settings, which only CPUs need."""
    if setting != "auto":
        return getattr(torch, setting)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    speed = cpu_bfloat16()
    if speed == "slow" and settings is not None:
        wide = footprint.footprint(settings, torch.float32, device, four_bit=False).weights
        return torch.float32 if FLOAT32_MEMORY_SHARE * wide <= total_bytes() else torch.bfloat16
    return torch.float32 if speed == "emulated" else torch.bfloat16


def card_of(source: str, tokenizer_source: str, model: PreTrainedModel, tokenizer: Any) -> ModelCard:
    """The card of a loaded model."""
    context_length, context_limit = support.context_length(model.config)
    if context_limit:
        log.warning("%s is served up to %d tokens: %s.", source, context_length, context_limit)
    eos = model.generation_config.eos_token_id if model.generation_config else None
    ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    return ModelCard(
        source=source,
        tokenizer=tokenizer_source,
        arch=model.config.model_type,
        vocab_size=model.config.get_text_config().vocab_size,
        context_length=context_length,
        context_limit=context_limit,
        original_context=support.original_context(model.config),
        eos_token_ids=tuple(sorted(ids)),
        dtype=precision.dtype_name(model.dtype),
        device=str(model.device),
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
    )
