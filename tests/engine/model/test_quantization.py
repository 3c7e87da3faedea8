"""Quantized base models: MXFP4 by its formula, FP8 blocks, refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.architectures import save_tiny
from tinsmith.engine.model import quantization
from tinsmith.errors import ConfigError, Unsupported

CPU, BF16 = torch.device("cpu"), torch.bfloat16
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def read(folder: Path, dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    options = quantization.load_options(str(folder), AutoConfig.from_pretrained(folder), "none", CPU, dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).state_dict()


def declare(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def quantize_experts(folder: Path) -> dict[str, torch.Tensor]:
    """Give a saved gpt_oss drawn experts in MXFP4, as its checkpoint has them: blocks of 32 values, two in a byte, the
    low half first, one scale for each block. Returns the experts' values."""
    tensors, draw, values = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(110, 135, blocks.shape[:3], generator=draw, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        nibbles = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
        wide = FP4[nibbles.long()] * torch.exp2(scales[..., None].float() - 127)
        values[name] = wide.flatten(2).transpose(1, 2).to(BF16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    declare(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]})
    return values


def test_mxfp4_is_converted_exactly(tmp_path: Path) -> None:
    expected = quantize_experts(save_tiny("gpt_oss", tmp_path))
    loaded = read(tmp_path)
    assert len(expected) == 8
    for name, values in expected.items():
        assert loaded[name].dtype == BF16
        assert torch.equal(loaded[name], values)


def test_fp8_blocks_are_converted(tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    """weight_scale_inv multiplies each block of 16 x 16."""
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    model.save_pretrained(tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        scales = torch.rand(rows // 16, columns // 16) + 0.5
        wide = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
        tensors[name] = (tensors[name] / wide).to(torch.float8_e4m3fn)
        tensors[name.replace(".weight", ".weight_scale_inv")] = scales
        expected[name] = (tensors[name].float() * wide).to(BF16)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    declare(tmp_path, {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"})
    loaded = read(tmp_path)
    for name, values in expected.items():
        assert loaded[name].dtype == BF16
        assert torch.equal(loaded[name], values)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "bitsandbytes"])
def test_other_quantized_checkpoints_are_refused_by_name(method: str) -> None:
    config = LlamaConfig(quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(Unsupported, match=rf"quantized by {method}"):
        quantization.load_options("some/model", config, "none", CPU, BF16)


def test_4bit_is_refused_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="bitsandbytes is not installed"):
        quantization.load_options("some/model", LlamaConfig(), "4bit", torch.device("cuda"), BF16)


def test_a_quantized_checkpoint_is_not_quantized_again() -> None:
    config = LlamaConfig(quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="not quantized again"):
        quantization.load_options("some/model", config, "4bit", torch.device("cuda"), BF16)
