"""Adapters of mixtures that PEFT made, imported and trained on: logprobs and gradients equal PEFT's."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.architectures import save_tiny
from tinsmith.engine.base import AdamParams, Datum, Pass, PassResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.exchange.adapters import make_readable, write
from tinsmith.engine.exchange.merge import merge
from tinsmith.engine.lora.saved_spec import read_spec
from tinsmith.engine.torch_engine import TorchEngine
from tinsmith.errors import Unsupported
from tinsmith.service.budgets.models import model_bytes

TYPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
}
ROWS = torch.randint(3, 512, (2, 15), generator=torch.Generator().manual_seed(5))
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def save(model_type: str) -> Path:
        if model_type not in folders:
            settings = {"num_hidden_layers": 2, **TYPES[model_type]}
            folders[model_type] = save_tiny(model_type, tmp_path_factory.mktemp(model_type), **settings)
        return folders[model_type]

    return save


@pytest.fixture(scope="module")
def engine_of(folder_of: Callable[[str], Path]) -> Callable[[str], TorchEngine]:
    engines: dict[str, TorchEngine] = {}

    def serve(model_type: str) -> TorchEngine:
        if model_type not in engines:
            source = str(folder_of(model_type))
            engines[model_type] = TorchEngine(EngineConfig(source=source, device="cpu", dtype="float32", threads=1))
        return engines[model_type]

    return serve


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def write_peft(base: Path, folder: Path, **settings: Any) -> None:
    """An adapter that PEFT wrote, with drawn A and B: every expert has its own."""
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(plain(base), LoraConfig(r=3, lora_alpha=6, **settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.1)
        model.save_pretrained(str(folder))


def peft_result(base: Path, adapter: Path) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Logprobs of the rows, and the gradients of their mean negative sum by parameter."""
    with warnings.catch_warnings(action="ignore"):
        model = PeftModel.from_pretrained(plain(base), adapter, is_trainable=True)
    logprobs = model(input_ids=ROWS[:, :-1]).logits.log_softmax(-1).gather(2, ROWS[:, 1:, None])[..., 0]
    (-logprobs.sum()).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logprobs.detach().numpy(), grads


def imported(engine: TorchEngine, adapter: Path, folder: Path, wait: Any) -> np.ndarray:
    """The model `m` of an imported adapter, with gradients; its logprobs of the rows."""
    make_readable(adapter, folder)
    wait(engine.fork("m", folder, optimizer=False))
    data = tuple(
        Datum(tokens=row[:-1].int().numpy(), targets=row[1:].numpy(), inputs={"weights": np.ones(14, np.float32)})
        for row in ROWS
    )
    [result] = wait(engine.run([Pass(model_id="m", data=data, loss_fn="cross_entropy")]))
    assert isinstance(result, PassResult), result
    return np.stack(result.logprobs)


@pytest.mark.parametrize("model_type", TYPES)
def test_trained_parameters_of_experts(model_type: str, folder_of: Any, engine_of: Any, wait: Any, tmp_path: Path):
    base, engine = folder_of(model_type), engine_of(model_type)
    write_peft(base, tmp_path / "peft", target_modules=["q_proj", "v_proj"], target_parameters=PARAMETERS)
    expected, grads = peft_result(base, tmp_path / "peft")
    assert np.abs(expected - peft_logprobs_without(base)).max() > 0.05
    np.testing.assert_allclose(imported(engine, tmp_path / "peft", tmp_path / "in", wait), expected, atol=1e-4)
    own = engine.trainer.gradients("m")
    stem = "base_model.model.model.layers.1.mlp.experts"
    up, down = (
        [next(grad for key, grad in grads.items() if key.startswith(f"{stem}.{inner}lora_{side}")) for side in "AB"]
        for inner in ("base_layer.", "")
    )
    w1, w2, w3 = (own[f"model.layers.1.mlp.experts.{leaf}"] for leaf in ("w1", "w2", "w3"))
    check(w1[0] + w3[0], up[0].view(8, 3, -1))  # PEFT has one A for gate and up
    check(w2[0], down[0].view(8, 3, -1))
    check(w2[1], down[1].view(-1, 3, 8).permute(2, 0, 1))
    fused = up[1].view(-1, 3, 8).permute(2, 0, 1)
    gate, linear = fused.chunk(2, dim=1) if model_type != "gpt_oss" else (fused[:, ::2], fused[:, 1::2])
    check(w1[1], gate)
    check(w3[1], linear)
    check(own["model.layers.0.self_attn.v_proj"][1], next(
        grad for key, grad in grads.items() if "layers.0.self_attn.v_proj.lora_B" in key
    ))  # fmt: skip


def check(result: np.ndarray, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(result, expected.numpy(), atol=2e-4 * float(expected.abs().max()))


def peft_logprobs_without(base: Path) -> np.ndarray:
    with torch.no_grad():
        logits = plain(base)(input_ids=ROWS[:, :-1]).logits
    return logits.log_softmax(-1).gather(2, ROWS[:, 1:, None])[..., 0].numpy()


def test_it_is_trained_saved_and_exported(folder_of: Any, engine_of: Any, wait: Any, tmp_path: Path):
    base, engine = folder_of("qwen3_moe"), engine_of("qwen3_moe")
    write_peft(base, tmp_path / "peft", target_modules=["q_proj"], target_parameters=PARAMETERS)
    before = imported(engine, tmp_path / "peft", tmp_path / "in", wait)
    wait(engine.step("m", AdamParams(learning_rate=0.01)))
    wait(engine.save("m", tmp_path / "saved", optimizer=True))
    wait(engine.load("again", tmp_path / "saved", optimizer=True))
    after = imported(engine, tmp_path / "saved", tmp_path / "in2", wait)
    assert np.abs(after - before).max() > 0.01
    write(tmp_path / "saved", tmp_path / "out", "peft", str(base))
    np.testing.assert_allclose(peft_result(base, tmp_path / "out")[0], after, atol=1e-4)


NAMES = {"qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")), "mixtral": ("mlp", ("w1", "w3", "w2"))}


@pytest.mark.parametrize("model_type", NAMES)
def test_pair_for_each_expert(model_type: str, folder_of: Any, engine_of: Any, wait: Any, tmp_path: Path):
    """The form of adapters of separate experts' Linears, which PEFT fuses when it loads them."""
    base, (block, names) = folder_of(model_type), NAMES[model_type]
    experts = plain(base).model.layers[0].mlp.experts
    hidden, width = experts.down_proj.shape[1:]
    draw, tensors = torch.Generator().manual_seed(2), {}
    for layer in range(2):
        for expert in range(8):
            for name, inputs, outputs in zip(names, (hidden, hidden, width), (width, width, hidden), strict=True):
                key = f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{name}.lora"
                tensors[f"{key}_A.weight"] = torch.randn(3, inputs, generator=draw) * 0.1
                tensors[f"{key}_B.weight"] = torch.randn(outputs, 3, generator=draw) * 0.1
    (tmp_path / "peft").mkdir()
    save_file(tensors, tmp_path / "peft" / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, "target_modules": list(names)}
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config))
    expected, _ = peft_result(base, tmp_path / "peft")
    assert np.abs(expected - peft_logprobs_without(base)).max() > 0.05
    result = imported(engine_of(model_type), tmp_path / "peft", tmp_path / "in", wait)
    np.testing.assert_allclose(result, expected, atol=1e-4)


def test_trained_router_is_refused_by_name(folder_of: Any, engine_of: Any, wait: Any, tmp_path: Path):
    write_peft(
        folder_of("qwen3_moe"), tmp_path / "peft", target_modules=["q_proj"], target_parameters=["mlp.gate.weight"]
    )
    with pytest.raises(Unsupported, match=r"mlp\.gate"):
        imported(engine_of("qwen3_moe"), tmp_path / "peft", tmp_path / "in", wait)


PATTERNS: dict[str, dict[str, Any]] = {
    "experts": {"rank_pattern": {"gate_up_proj": 5, "q_proj": 1}, "alpha_pattern": {"down_proj": 4}},
    "one layer": {"rank_pattern": {r"layers\.1\..*": 2}},
    "rslora": {"use_rslora": True, "rank_pattern": {r"mlp\.experts\.down_proj": 1}},
}


@pytest.mark.parametrize("settings", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("model_type", TYPES)
def test_patterns_of_ranks_and_alphas(
    model_type: str, settings: Any, folder_of: Any, engine_of: Any, wait: Any, tmp_path: Path
):
    base, engine = folder_of(model_type), engine_of(model_type)
    write_peft(base, tmp_path / "peft", target_modules=["q_proj", "v_proj"], target_parameters=PARAMETERS, **settings)
    expected, _ = peft_result(base, tmp_path / "peft")
    np.testing.assert_allclose(imported(engine, tmp_path / "peft", tmp_path / "in", wait), expected, atol=1e-4)
    wait(engine.save("m", tmp_path / "saved", optimizer=True))
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    for source in (tmp_path / "peft", tmp_path / "saved"):
        for form in ("peft", "vllm", "tinker"):
            to = tmp_path / f"{source.name}-{form}"
            write(source, to, form, str(base))
            if form == "peft":
                np.testing.assert_allclose(peft_result(base, to)[0], expected, atol=1e-4)
            result = imported(engine, to, tmp_path / f"{to.name}-in", wait)
            np.testing.assert_allclose(result, expected, atol=1e-4)
            wait(engine.save("m", to / "again", optimizer=False))
            again = load_file(to / "again" / "adapter_model.safetensors")
            assert form == "vllm" or all(torch.equal(again[name], saved[name]) for name in saved)
    merge(tmp_path / "peft", base, tmp_path / "merged")
    np.testing.assert_allclose(peft_logprobs_without(tmp_path / "merged"), expected, atol=1e-4)


PARTS = [["mlp.experts.gate_up_proj"], ["mlp.experts.down_proj"], ["layers.1.mlp.experts.down_proj"]]


@pytest.mark.parametrize("parameters", PARTS, ids=str)
@pytest.mark.parametrize("model_type", TYPES)
def test_some_parameters_of_experts(
    model_type: str, parameters: list[str], folder_of: Any, engine_of: Any, wait: Any, tmp_path: Path
):
    base, engine = folder_of(model_type), engine_of(model_type)
    write_peft(base, tmp_path / "peft", target_modules=["layers.0.self_attn.q_proj"], target_parameters=parameters)
    expected, _ = peft_result(base, tmp_path / "peft")
    np.testing.assert_allclose(imported(engine, tmp_path / "peft", tmp_path / "in", wait), expected, atol=1e-4)
    wait(engine.step("m", AdamParams(learning_rate=0.01)))
    wait(engine.save("m", tmp_path / "saved", optimizer=True))
    after = imported(engine, tmp_path / "saved", tmp_path / "in2", wait)
    write(tmp_path / "saved", tmp_path / "out", "peft", str(base))
    np.testing.assert_allclose(peft_result(base, tmp_path / "out")[0], after, atol=1e-4)
    merge(tmp_path / "saved", base, tmp_path / "merged")
    np.testing.assert_allclose(peft_logprobs_without(tmp_path / "merged"), after, atol=1e-4)
    write(tmp_path / "saved", tmp_path / "vllm", "vllm", str(base))
    np.testing.assert_allclose(imported(engine, tmp_path / "vllm", tmp_path / "in3", wait), after, atol=1e-4)


def test_memory_of_separate_experts_is_that_of_their_tensors(folder_of: Any, engine_of: Any, wait: Any, tmp_path: Path):
    """Fails without `separate_mlp_per_rank` in `model_bytes`: eight experts would count as one on one side."""
    engine = engine_of("qwen3_moe")
    write_peft(folder_of("qwen3_moe"), tmp_path / "peft", target_parameters=PARAMETERS, target_modules=[])
    imported(engine, tmp_path / "peft", tmp_path / "in", wait)
    wait(engine.step("m", AdamParams()))
    model = engine.trainer._models["m"]
    moments = model.moments()
    tensors = (model.master, model.gradient, moments.exp_avg, moments.exp_avg_sq)
    wait(engine.save("m", tmp_path / "saved", optimizer=False))
    lora = read_spec(tmp_path / "saved")
    assert lora.separate_experts
    assert model_bytes(lora, engine.card) == sum(tensor.nbytes for tensor in tensors)
    assert model_bytes(replace(lora, separate_experts=False), engine.card) < model_bytes(lora, engine.card)
