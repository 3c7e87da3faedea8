"""4-bit base models against transformers and PEFT with the same blocks of bitsandbytes. Skipped without the library:
pip install 'tinsmith[4bit]'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import BitsAndBytesConfig

from tests.architectures import MIXTURES, RECURRENT, save_tiny
from tests.engine.data import pass_for
from tests.engine.inspection import gradients_of
from tests.engine.reference import Reference, assert_same
from tests.engine.sampling.helpers import PROMPT, sample_request, trained_logprobs
from tinsmith.engine.base import AdamParams, LoraSpec
from tinsmith.engine.build import build
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.exchange.merge import merge
from tinsmith.engine.images.tower import without_weights
from tinsmith.engine.lora.quantized_linear import FEW_ROWS, QuantizedLinear, frozen_linear
from tinsmith.engine.model import footprint, loading, quantization
from tinsmith.engine.model.mixture.gates import linear_gates

library: Any = pytest.importorskip("bitsandbytes")

ADAM = AdamParams(learning_rate=0.01)
LORA = LoraSpec(rank=4, seed=1)


def blocks(skipped: Sequence[str] = ()) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head", *skipped] if skipped else None,
    )


def plain_blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The model's 4-bit modules. On some CPUs the library would compute them from rounded copies."""
    for name, module in model.named_modules():
        if isinstance(module, library.nn.Linear4bit):
            vars(module)["support_avx512bf16_for_cpu"] = False
            yield name, module


def matrix(module: Any) -> Tensor:
    wide: Tensor = library.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    return wide


@pytest.fixture
def four_bit(engine_of: Callable[..., Any]) -> Any:
    """The engine on the tiny Llama in 4 bits."""
    return engine_of("llama", quantize="4bit")


@pytest.fixture
def oracle(tiny: Callable[[str], Path], adapter_of: Callable[..., Path]) -> Reference:
    """PEFT on the same blocks, with a trained adapter."""
    reference = Reference(tiny("llama"), adapter_of("llama"), torch.float32, quantization_config=blocks())
    assert sum(1 for _ in plain_blocks(reference.model)) == 2 * 7
    return reference


def test_product_is_that_of_the_dequantized_matrix() -> None:
    torch.manual_seed(0)
    module = library.nn.Linear4bit(128, 64, bias=True, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    frozen, inputs, grads = frozen_linear(module), torch.randn(5, 128), torch.randn(5, 64)
    assert isinstance(frozen, QuantizedLinear)
    assert frozen.shape == (64, 128)
    wide = matrix(module)
    torch.testing.assert_close(frozen(inputs), inputs @ wide.T + module.bias)
    torch.testing.assert_close(frozen.backward(grads), grads @ wide)
    torch.testing.assert_close(frozen.backward(grads, onto=torch.ones(5, 128)), 1 + grads @ wide)


@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_are_those_of_the_dequantized_matrix(rows: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    """On a CPU to the bit: bitsandbytes has no kernel for few rows there. To break it: `self._weight` without `t`."""
    torch.manual_seed(0)
    module = library.nn.Linear4bit(128, 64, bias=True, compute_dtype=dtype, quant_type="nf4").to(dtype).to("cpu")
    frozen, inputs, calls = frozen_linear(module), torch.randn(rows, 128, dtype=dtype), []
    multiply = library.matmul_4bit
    monkeypatch.setattr(library, "matmul_4bit", lambda *args, **rest: calls.append(1) or multiply(*args, **rest))
    assert torch.equal(frozen(inputs), nn.functional.linear(inputs, matrix(module).to(dtype), module.bias))
    assert len(calls) == (rows <= FEW_ROWS)


def test_training_decodes_a_matrix_once(four_bit: Any, wait: Any, model_id: str, monkeypatch: Any) -> None:
    """In a forward and its backward. To break it: leave out `keep_decoded` in TorchEngine."""
    wait(four_bit.create(model_id, LORA))
    decode, calls = library.functional.dequantize_4bit, []
    monkeypatch.setattr(
        library.functional, "dequantize_4bit", lambda *args, **rest: calls.append(1) or decode(*args, **rest)
    )
    wait(four_bit.run([pass_for("cross_entropy", model_id)]))
    assert len(calls) == 2 * 7
    wait(four_bit.drop(model_id))


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo"])
def test_loss_gradients_and_step_match_peft(
    loss_fn: str, four_bit: Any, oracle: Reference, adapter_of: Callable[..., Path], wait: Any, model_id: str
) -> None:
    wait(four_bit.load(model_id, adapter_of("llama"), optimizer=False))
    for seed in range(2):  # the second time with stepped weights
        request = pass_for(loss_fn, model_id, seed=seed)
        (result,) = wait(four_bit.run([request]))
        _, logprobs = oracle.loss(request)
        oracle.backward(request)
        for actual, wanted in zip(result.logprobs, logprobs, strict=True):
            np.testing.assert_allclose(actual, wanted.detach().numpy(), atol=2e-5)
        assert_same(gradients_of(four_bit, model_id), oracle.gradients())
        wait(four_bit.step(model_id, ADAM))
        oracle.step(ADAM)


def test_samples_match_peft(
    four_bit: Any, oracle: Reference, adapter_of: Callable[..., Path], wait: Any, model_id: str
) -> None:
    """Greedy tokens and their logprobs, from the cache, against full forwards."""
    wait(four_bit.load(model_id, adapter_of("llama"), optimizer=False))
    wait(four_bit.capture(model_id, model_id))
    (sequence,) = wait(four_bit.sample(sample_request(version=model_id, temperature=0.0))).sequences
    logprobs = torch.as_tensor(oracle.logits([*PROMPT, *sequence.tokens.tolist()])).log_softmax(-1)
    wanted = logprobs[len(PROMPT) - 1 : -1]
    assert wanted.argmax(-1).tolist() == sequence.tokens.tolist()
    np.testing.assert_allclose(sequence.logprobs, wanted.max(-1).values.numpy(), atol=2e-5)


def test_saved_adapter_continues_with_the_same_bits(four_bit: Any, wait: Any, model_id: str, tmp_path: Path) -> None:
    wait(four_bit.create(model_id, LORA))
    wait(four_bit.run([pass_for("cross_entropy", model_id)]))
    wait(four_bit.step(model_id, ADAM))
    wait(four_bit.save(model_id, tmp_path / "saved", optimizer=True))
    wait(four_bit.load(f"{model_id}-copy", tmp_path / "saved", optimizer=True))
    for name in (model_id, f"{model_id}-copy"):
        wait(four_bit.run([pass_for("cross_entropy", name, seed=1)]))
        wait(four_bit.step(name, ADAM))
    first, second = (
        trained_logprobs(four_bit, wait, name, PROMPT, np.arange(3, 20)) for name in (model_id, f"{model_id}-copy")
    )
    np.testing.assert_array_equal(first, second)


def test_merged_model_has_the_original_weights(
    four_bit: Any,
    adapter_of: Callable[..., Path],
    tiny: Callable[[str], Path],
    wait: Any,
    model_id: str,
    tmp_path: Path,
) -> None:
    """W + s B A of the original W: its logprobs are those of a plain engine, and only close to the 4-bit one's."""
    wait(four_bit.load(model_id, adapter_of("llama"), optimizer=False))
    wait(four_bit.save(model_id, tmp_path / "saved", optimizer=False))
    merge(tmp_path / "saved", tiny("llama"), tmp_path / "merged")
    tokens = [*PROMPT, *range(3, 20)]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        actual = merged(torch.tensor([tokens])).logits[0].log_softmax(-1)
    wanted = torch.as_tensor(Reference(tiny("llama"), adapter_of("llama"), torch.float32).logits(tokens)).log_softmax(
        -1
    )
    torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=0)
    targets = torch.tensor(tokens[len(PROMPT) :])
    served = trained_logprobs(four_bit, wait, model_id, PROMPT, targets.numpy())
    distance = (actual[len(PROMPT) - 1 : -1].gather(1, targets[:, None])[:, 0] - torch.as_tensor(served)).abs()
    assert 1e-3 < distance.mean() < 1.0


@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v3",  # projections that are frozen and in 4 bits; no latents in caches
        "qwen3_5_text",  # slices of rows, recurrent layers
        "gpt2",  # transposed matrices, the general path
        pytest.param("qwen3_next", marks=pytest.mark.slow),  # only its general path has its projections in 4 bits
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        "hunyuan_v1_moe",  # routers that are linear modules
        "longcat_flash",  # a router that reads its weight itself
        "qwen2_moe",  # gates of shared experts
    ],
)
def test_type_computes_with_the_dequantized_matrices(model_type: str, tmp_path: Path, wait: Any) -> None:
    save_tiny(model_type, tmp_path / "model")
    settings = blocks(["wg", "classifier", "shared_expert_gate"])
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=settings, dtype=torch.float32)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, module in plain_blocks(packed):
        target = wide.get_submodule(name)
        target.weight.data = matrix(module) if isinstance(target, nn.Linear) else matrix(module).T.contiguous()
    wide.save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "wide")
    outcomes: list[Any] = []
    for folder, quantize in (("model", "4bit"), ("wide", "none")):
        config: Any = {"source": str(tmp_path / folder), "quantize": quantize}
        engine: Any = build(EngineConfig(**config, dtype="float32", device="cpu", threads=1))
        wait(engine.create("model", replace(LORA, train_mlp=model_type != "longcat_flash")))
        wait(engine.run([pass_for("cross_entropy", "model", seed=1)]))
        wait(engine.step("model", ADAM))
        outcomes.append((wait(engine.run([pass_for("cross_entropy", "model", seed=2)])), gradients_of(engine, "model")))
        wait(engine.close())
    ((left,), left_grads), ((right,), right_grads) = outcomes
    for actual, expected in zip(left.logprobs, right.logprobs, strict=True):
        np.testing.assert_allclose(actual, expected, atol=5e-5)
    assert_same(left_grads, right_grads)


@pytest.mark.parametrize("model_type", [*MIXTURES, *RECURRENT])
def test_selection_is_what_is_loaded(model_type: str, tmp_path: Path) -> None:
    """Of modules, and so of bytes; routers and gates have the weights of the file."""
    save_tiny(model_type, tmp_path)
    model = loading.read(EngineConfig(source=str(tmp_path), quantize="4bit", dtype="float32", device="cpu")).model
    packed = dict(plain_blocks(model))
    plain = without_weights(model.config, torch.float32)
    assert packed.keys() == quantization.four_bit_modules(plain)
    stored = sum(parameter.nbytes for parameter in model.parameters())
    stored += sum(module.weight.quant_state.absmax.nbytes for module in packed.values())
    assert footprint.footprint(model.config, torch.float32, torch.device("cpu"), four_bit=True).weights == stored
    original = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name in linear_gates(plain):
        torch.testing.assert_close(
            model.get_submodule(name).weight, original.get_submodule(name).weight, atol=0, rtol=0
        )
