"""Tiny random vision-language models with image processor and tokenizer, written to a folder as transformers would.

The image processor's files are made from its class: a patch has 8 x 8 pixels, a token of the language model 16 x 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.models import VOCABULARY, save_tokenizer

IMAGE, VIDEO, START, END = 511, 510, 509, 508
"""Ids of the placeholders of images and videos, and of what comes before and after an image."""
TOKEN_PIXELS = 16
"""Width and height of a token of an image."""
MIN_TOKENS, MAX_TOKENS = 4, 48

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template as those of Qwen3-VL: images are parts of a message."""

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
                        "mrope_interleaved": True},
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {**_TEXT["rope_parameters"], "partial_rotary_factor": 1.0},
}
_TEXT_OF_TYPE: dict[str, dict[str, Any]] = {
    "qwen3_vl": {},
    "qwen3_vl_moe": {**_EXPERTS, "decoder_sparse_step": 1},
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": {**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 32},
}
TYPES = tuple(_TEXT_OF_TYPE)
"""Types of models with a vision tower."""


def vision_model(model_type: str = "qwen3_vl", *, seed: int = 0) -> PreTrainedModel:
    """A random model of a type with a vision tower, in float32."""
    vision = {**_VISION, **({"deepstack_visual_indexes": [0, 1]} if "vl" in model_type else {})}
    config = AutoConfig.for_model(
        model_type,
        text_config={**_TEXT, **_TEXT_OF_TYPE[model_type]},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim > 1:
                parameter.normal_(std=1.5 / parameter[0].numel() ** 0.5)
            else:
                parameter.normal_(std=0.3)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return model


def image_processor() -> Qwen2VLImageProcessorPil:
    """The models' image processor."""
    side = TOKEN_PIXELS**2
    return Qwen2VLImageProcessorPil(
        patch_size=8,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": MIN_TOKENS * side, "longest_edge": MAX_TOKENS * side},
    )


def save_vision_model(folder: Path, model_type: str = "qwen3_vl", *, seed: int = 0) -> Path:
    """Write a random model, its tokenizer and its image processor to a folder; returns it."""
    vision_model(model_type, seed=seed).save_pretrained(folder)
    tokenizer = save_tokenizer(folder)
    start, image, end = tokenizer.convert_ids_to_tokens([START, IMAGE, END])
    tokenizer.chat_template = CHAT.replace("IMAGE", f"{start}{image}{end}")
    tokenizer.save_pretrained(folder)
    image_processor().save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 48, height: int = 32, form: str = "png") -> bytes:
    """A file with random blocks of color."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    image = Image.fromarray(blocks.repeat(8, 0).repeat(8, 1))
    image.save(file := BytesIO(), form)
    return file.getvalue()


def opened(file: bytes) -> Image.Image:
    """A file's image."""
    return Image.open(BytesIO(file))


def image_tokens(file: bytes) -> int:
    """Number of tokens that a file's image takes, by transformers' processor."""
    grid = image_processor()(images=[opened(file)], return_tensors="pt")["image_grid_thw"]
    return int(grid.prod()) // 4


def plain_inputs(parts: Sequence[list[int] | bytes]) -> dict[str, torch.Tensor]:
    """Arguments of transformers' models for a row of token ids and image files."""
    ids = [token for part in parts for token in (part if isinstance(part, list) else [IMAGE] * image_tokens(part))]
    inputs = {"input_ids": torch.tensor([ids])}
    if images := [opened(part) for part in parts if isinstance(part, bytes)]:
        processed = image_processor()(images=images, return_tensors="pt")
        inputs |= {name: processed[name] for name in ("pixel_values", "image_grid_thw")}
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    return inputs
