"""Quantized base models: checkpoints that hold quantized weights, and 4-bit weights made at load (`quantize: 4bit`).

Checkpoints in MXFP4 (gpt-oss) and in blocks of FP8 (DeepSeek) are converted to the serving dtype while they are read,
tensor by tensor; MXFP4 has no value that bfloat16 lacks, so that conversion is exact. Other quantized checkpoints are
refused by name. 4-bit weights are bitsandbytes' NF4: the projections become its Linear4bit, while embeddings, the
output head, routers and experts that are fused into one parameter stay in the serving dtype. Adapters are not
quantized.
"""

from __future__ import annotations

from enum import Enum
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import BitsAndBytesConfig, FineGrainedFP8Config, Mxfp4Config

from tinsmith.engine.images.tower import without_weights
from tinsmith.engine.model.mixture.gates import linear_gates
from tinsmith.engine_options import Quantize
from tinsmith.errors import ConfigError, Unsupported

_REORDERS = "support_avx512bf16_for_cpu"
"""The attribute of bitsandbytes' Linear4bit that makes it reorder its blocks."""


def load_options(
    source: str, config: PreTrainedConfig, setting: Quantize, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of `from_pretrained` for the model's quantization; none for a plain model.

    Raises Unsupported for a checkpoint in a form that is not read, ConfigError if 4-bit weights cannot be had here.
    """
    form = checkpoint_form(config)
    if form and setting != "none":
        raise ConfigError(
            f"{source} is a checkpoint in {form}, which is not quantized again.", f"Remove quantize={setting}."
        )
    if form == "mxfp4":
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    if form == "fp8":
        return {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    if form:
        raise Unsupported(
            f"{source} is a checkpoint quantized by {form}, which cannot be read.",
            "Serve the checkpoint that is not quantized, or one in mxfp4 or fp8.",
        )
    if setting == "none":
        return {}
    _require_bitsandbytes(source)
    # Without a device, transformers would put 4-bit weights on a GPU wherever there is one.
    return {"quantization_config": four_bit_config(without_weights(config, dtype)), "device_map": {"": device}}


def four_bit_config(model: PreTrainedModel) -> BitsAndBytesConfig:
    """NF4 weights of a model's projections, whose products are computed in its dtype."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=model.dtype,
        llm_int8_skip_modules=_unquantized(model),
    )


def four_bit_modules(model: PreTrainedModel) -> set[str]:
    """Paths of the modules of a plain model whose weights are in 4 bits after `four_bit_config`."""
    unquantized = _unquantized(model)
    return {
        name
        for name, module in model.named_modules()
        # Subclasses of Linear have products of their own.
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, unquantized)
    }


def _unquantized(model: PreTrainedModel) -> list[str]:
    """Modules whose weights stay as they are, as patterns of transformers: the output head, routers and gates of
    mixtures, and what the model's own code has in float32."""
    in_float32 = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    return sorted({*get_keys_to_not_convert(model), *linear_gates(model), *in_float32})


def keep_blocks(model: nn.Module) -> None:
    """Have 4-bit modules keep their blocks as `lora.quantized_linear` reads them.

    On CPUs with AVX-512, bitsandbytes would reorder them at the first product and round their scales to bfloat16.
    """
    for module in model.modules():
        if _REORDERS in vars(module):
            setattr(module, _REORDERS, False)


def checkpoint_form(config: PreTrainedConfig) -> str:
    """Name of the method that a checkpoint's weights are quantized by; empty for a plain one."""
    for part in (config, config.get_text_config()):
        if settings := part.to_dict().get("quantization_config"):
            method = settings.get("quant_method", "an unnamed method")
            return str(method.value if isinstance(method, Enum) else method)
    return ""


def _require_bitsandbytes(source: str) -> None:
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{source} cannot have 4-bit weights: bitsandbytes is not installed.",
            "Install it: pip install 'tinsmith[4bit]'.",
        )
