"""Exports loaded by the programs that they are for: llama.cpp's converter with transformers' GGUF reader, and vLLM.

Runs in test-all only; each test is skipped where its program is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.architectures import save_tiny
from tests.engine.exchange.test_forms import adapter as drawn_adapter
from tests.engine.exchange.test_forms import load_with_peft
from tests.engine.exchange.test_forms import merged as merged_weights
from tests.engine.reference import plain_model, write_adapter
from tests.engine.vllm.real import vllm_python
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.exchange import gguf
from tinsmith.engine.exchange.adapters import write
from tinsmith.engine.exchange.merge import merge
from tinsmith.engine.lora import peft
from tinsmith.errors import ConfigError

pytestmark = pytest.mark.slow

TEXT = "Once upon a time there was a smith of tin. His hands know the work better than he does."
VLLM_PROGRAM = Path(__file__).parent / "vllm_logprobs.py"
VLLM_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def vllm() -> Callable[..., torch.Tensor]:
    """Logprobs of tokens by a model and an adapter, from vLLM."""
    python = vllm_python()

    def logprobs(model: Path, adapter: Path | None, tokens: list[int]) -> torch.Tensor:
        command = [str(python), str(VLLM_PROGRAM), str(model), str(adapter or ""), json.dumps(tokens)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | VLLM_ENVIRONMENT
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if "triton" in done.stderr + done.stdout and done.returncode:
            pytest.skip("this vLLM computes adapters of experts with Triton only, which this machine has not")
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("logprobs "))
        return torch.tensor(json.loads(line.removeprefix("logprobs ")))

    return logprobs


@pytest.fixture(scope="module")
def adapter(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    lora = LoraSpec(rank=8, seed=1, train_unembed=False)
    return write_adapter(smollm2, tmp_path_factory.mktemp("adapter"), lora, size=0.02)


@pytest.fixture(scope="module")
def merged(smollm2: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "merged"
    merge(adapter, smollm2, folder)
    return folder


def token_logprobs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_gguf_of_real_converter_is_the_merged_model(merged: Path, tmp_path: Path):
    try:
        converter = gguf.find_converter(None)
    except ConfigError as error:
        pytest.skip(f"no llama.cpp here: {error}")
    gguf.convert(converter, merged, tmp_path / "model.gguf", "f32")
    tokens = AutoTokenizer.from_pretrained(merged)(TEXT).input_ids
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    expected = token_logprobs(plain_model(merged, torch.float32), tokens)
    torch.testing.assert_close(token_logprobs(read, tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_vllm_computes_the_logprobs_of_exports(
    form: str, vllm: Any, smollm2: Path, adapter: Path, merged: Path, tmp_path: Path
):
    write(adapter, tmp_path / "vllm", "vllm")
    tokens = AutoTokenizer.from_pretrained(merged)(TEXT).input_ids
    model, lora = (merged, None) if form == "merged" else (smollm2, tmp_path / "vllm")
    plain = plain_model(model, torch.float32)
    if lora is not None:  # merged weights are rounded to the base's float16
        plain = load_with_peft(plain, adapter)
    torch.testing.assert_close(vllm(model, lora, tokens), token_logprobs(plain, tokens), atol=5e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_vllm_loads_adapters_of_tiny_models(model_type: str, vllm: Any, tmp_path: Path):
    base = save_tiny(model_type, tmp_path / "base", hidden_size=128, head_dim=32, num_hidden_layers=2)
    model = plain_model(base, torch.float32)
    layout, flat, facts = drawn_adapter(model, 4, train_unembed=False)
    peft.write(tmp_path / "checkpoint", layout, flat, str(base), None)
    write(tmp_path / "checkpoint", tmp_path / "vllm", "vllm")
    tokens = list(range(3, 23))
    plain = token_logprobs(model, tokens)
    with torch.no_grad():
        for name, weight in merged_weights(model, layout, flat, facts).items():
            model.get_parameter(name).copy_(weight)
    expected = token_logprobs(model, tokens)
    assert (expected - plain).abs().max() > 0.05
    actual = vllm(base, tmp_path / "vllm", tokens)
    print(f"adapter of {model_type}: largest difference of a logprob {(actual - expected).abs().max():.0e}")
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen3_moe"])
def test_vllm_computes_merged_tiny_models(model_type: str, vllm: Any, tmp_path: Path):
    """With the head adapted, so that the merged model has one of its own."""
    base = save_tiny(model_type, tmp_path / "base", hidden_size=128, head_dim=32, num_hidden_layers=2)
    model = plain_model(base, torch.float32)
    layout, flat, _ = drawn_adapter(model, 4)
    peft.write(tmp_path / "checkpoint", layout, flat, str(base), None)
    merge(tmp_path / "checkpoint", base, tmp_path / "merged")
    tokens = list(range(3, 23))
    expected = token_logprobs(plain_model(tmp_path / "merged", torch.float32), tokens)
    assert (expected - token_logprobs(model, tokens)).abs().max() > 0.05
    actual = vllm(tmp_path / "merged", None, tokens)
    print(f"merged {model_type}: largest difference of a logprob {(actual - expected).abs().max():.0e}")
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
