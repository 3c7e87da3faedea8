"""Adapters in and out without a service: partial adapters, rsLoRA, refusals, archives, GGUF."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests.engine.reference import plain_model, tied_embeddings_are_meant, write_adapter
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.exchange import gguf
from tinsmith.engine.exchange.adapters import make_readable
from tinsmith.engine.exchange.archive import pack, unpack
from tinsmith.errors import BadRequest, ConfigError, Unsupported

TOKENS = torch.tensor([[5, 17, 30, 8, 44, 61, 9, 2]])


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    with tied_embeddings_are_meant(), torch.no_grad():
        model = plain_model(folder, torch.float32)
        model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
        return model(input_ids=TOKENS).logits


def write_peft(base: Path, folder: Path, *, size: float = 0.2, **settings: Any) -> Path:
    """An adapter that PEFT wrote, with random A and B."""
    torch.manual_seed(0)
    with tied_embeddings_are_meant():
        model = get_peft_model(plain_model(base, torch.float32), LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, size)
    with warnings.catch_warnings(action="ignore"):  # beside an adapter of the head PEFT saves the frozen weights
        model.save_pretrained(str(folder))
    return folder


def test_all_linear_with_head_and_rslora_is_read(tiny_llama: Path, tmp_path: Path):
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    pattern = rf".*({'|'.join(names)})"
    adapter = write_peft(tiny_llama, tmp_path / "peft", r=4, lora_alpha=8, target_modules=pattern, use_rslora=True)
    assert make_readable(adapter, tmp_path / "adapter") == []
    torch.testing.assert_close(
        logits(tiny_llama, tmp_path / "adapter"), logits(tiny_llama, adapter), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("change", ["base_model.model.lm_head.weight", "magnitude", "finite", "pickled"])
def test_what_is_not_plain_lora_is_refused(change: str, tiny_llama: Path, tmp_path: Path):
    adapter = write_adapter(tiny_llama, tmp_path / "peft", LoraSpec(rank=2, seed=1))
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = next(iter(tensors))
    if change == "finite":
        tensors[first][0, 0] = torch.nan
    elif change == "magnitude":
        tensors[first.replace("lora_A.weight", "lora_magnitude_vector")] = torch.ones(3)
    else:
        tensors[change] = torch.ones(3)
    save_file(tensors, weights)
    if change == "pickled":
        weights.rename(adapter / "adapter_model.bin")
    with pytest.raises((ConfigError, Unsupported), match=r"plain LoRA|finite|safetensors") as error:
        make_readable(adapter, tmp_path / "out")
    assert str(adapter) in str(error.value)
    assert not (tmp_path / "out").exists()


def test_archive_takes_only_the_adapters_files(tmp_path: Path):
    (tmp_path / "in").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "other"):
        (tmp_path / "in" / name).write_text(name)
    pack(tmp_path / "in", tmp_path / "a.tar")
    unpack(tmp_path / "a.tar", tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(
        ("adapter_config.json", "adapter_model.safetensors")
    )
    (tmp_path / "b.tar").write_bytes(b"no archive" * 200)
    with pytest.raises(BadRequest, match="cannot be read"):
        unpack(tmp_path / "b.tar", tmp_path / "bad")


def test_converter_is_called_and_its_errors_are_shown(tmp_path: Path):
    """A stand-in for llama.cpp's converter; the real one is checked by test_real_exports."""
    sources = tmp_path / "llama.cpp"
    sources.mkdir()
    converter = sources / gguf.CONVERTER
    converter.write_text("import sys\nopen(sys.argv[3], 'w').write(' '.join(sys.argv[1:]))\n")
    gguf.convert(gguf.find_converter(sources), tmp_path / "model", tmp_path / "m.gguf", "f16")
    expected = f"{tmp_path / 'model'} --outfile {tmp_path / 'm.gguf'} --outtype f16"
    assert (tmp_path / "m.gguf").read_text() == expected
    converter.write_text("raise SystemExit('unknown architecture')\n")
    with pytest.raises(ConfigError, match="unknown architecture"):
        gguf.convert(converter, tmp_path / "model", tmp_path / "n.gguf", "f16")
    with pytest.raises(ConfigError, match="There is no"):
        gguf.find_converter(tmp_path / "absent")
