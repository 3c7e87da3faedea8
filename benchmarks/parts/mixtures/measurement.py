"""A small random mixture of experts: fast path against general path and `generate`, its experts against dense products.

The model has the shape of Qwen3-30B-A3B at an eighth of its width, with 6 layers. The last lines are about routing: how
often the trainer chooses other experts than the sampler, and what a replay leaves of the difference of logprobs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig

from benchmarks.baseline import Baseline, load
from benchmarks.comparison import Line, Setting, in_turns, rotate
from benchmarks.engine_driver import EngineDriver
from benchmarks.parts.sampling import against_generate
from benchmarks.workloads import grpo, questions
from tinsmith.engine.base import Datum, LoraSpec, Pass, SampleResult
from tinsmith.engine.lora import compiled_adapters
from tinsmith.engine.lora.adapter import AdapterLayout, adapter_weights
from tinsmith.engine.lora.experts import install as experts
from tinsmith.engine.lora.targets import expert_target
from tinsmith.engine.model.support import is_expert_stack
from tinsmith.routed_experts import to_words

RANK = 16
PROMPTS, SAMPLES, TOKENS = 8, 8, 32
ROWS = 1024
"""Tokens of the products of experts: about a micro-batch."""
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 96,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "norm_topk_prob": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LAYER = {**SHAPE, "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 1}
"""One layer, for the products of experts."""
FINE_LAYER = {**LAYER, "hidden_size": 512, "moe_intermediate_size": 192, "num_experts": 64, "num_experts_per_tok": 8}
"""The same with more and smaller experts, whose products are short of rows and of columns."""


def measure(setting: Setting) -> list[Line]:
    """Training with shared prompts, sampling, the products of experts, and routing."""
    with tempfile.TemporaryDirectory() as folder:
        mixture = replace(setting, folder=save_mixture(Path(folder), setting.folder))
        products = [*_product_lines(setting, LAYER, 0.5, 0.7), *_product_lines(setting, FINE_LAYER)]
        return [*_speed(mixture), *products]


def save_mixture(folder: Path, tokenizer: Path) -> Path:
    """A random mixture with the tokenizer of another model; its weights are drawn from a seed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():  # fresh routers are so even that every choice is a tie
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder / file.name)
    return folder


def _speed(setting: Setting) -> list[Line]:
    fast, general = EngineDriver(setting), EngineDriver(setting, path="general")
    batch = grpo(groups=4)

    def train(driver: EngineDriver) -> Callable[[], None]:
        driver.create("bench", RANK)

        def once() -> None:
            driver.run(batch.as_pass("bench"))
            driver.step("bench")

        return once

    training = in_turns(train(fast), train(general), setting.turns)
    theirs = Baseline(load(setting), RANK, ["q_proj", "k_proj", "v_proj", "o_proj"])
    fast.capture("bench", "version")
    sampling = against_generate(fast, theirs, setting, PROMPTS, SAMPLES, TOKENS)
    routing = _routing(fast, questions(PROMPTS))
    fast.close()
    general.close()
    name = "mixture (32 experts, 4 for each token)"
    return [
        training.line(f"{name}: {batch.name}", "the general path, padded rows", 3.0, 4.0, batch.tokens),
        sampling.line(
            f"{name}: {PROMPTS} prompts x {SAMPLES} samples x {TOKENS} tokens",
            f"transformers.generate(num_return_sequences={SAMPLES}), attention adapted",
            4.0,
            5.0,
            PROMPTS * SAMPLES * TOKENS,
        ),
        *routing,
    ]


def _routing(driver: EngineDriver, prompts: Sequence[np.ndarray]) -> list[Line]:
    """What sampler and trainer differ in, without and with a replay of the sampler's experts."""
    results = driver.sample(prompts, "version", SAMPLES, TOKENS, routed_experts=True)
    data = tuple(
        _datum(prompt, result, number)
        for prompt, result in zip(prompts, results, strict=True)
        for number in range(len(result.sequences))
    )
    metrics = {}
    for replays in (0, 1):
        request = Pass(
            model_id="bench",
            data=data,
            loss_fn="importance_sampling",
            loss_config={"router_replay": replays},
            forward_only=True,
        )
        [result] = driver.run(request)
        metrics[replays] = result.metrics
    work, baseline = "routing of sampled tokens in the trainer", "the sampler's"
    shares = [
        Line(work=f"{work}: layers with other experts", baseline=baseline, unit="%", lower=True, least=1.0,
             values=[100 * metrics[0]["expert_mismatch:mean"]])
    ]  # fmt: skip
    return shares + [
        Line(work=f"{work}: mean difference of logprobs, {label}", baseline=baseline, unit="", lower=True,
             values=[metrics[replays]["logprob_mismatch:mean"]])
        for replays, label in ((0, "own routing"), (1, "replayed"))
    ]  # fmt: skip


def _datum(prompt: np.ndarray, result: SampleResult, number: int) -> Datum:
    """A sampled sequence with the record of its experts; the version that sampled it is the model in training."""
    sequence = result.sequences[number]
    assert result.prompt_routed_experts is not None
    assert sequence.routed_experts is not None
    tokens = np.concatenate([prompt, sequence.tokens]).astype(np.int32)
    blank = np.zeros(len(prompt) - 1, np.float32)
    inputs = {
        "logprobs": np.concatenate([blank, sequence.logprobs]),
        "advantages": np.concatenate([blank, np.ones(len(sequence.tokens), np.float32)]),
    }
    record = np.concatenate([result.prompt_routed_experts, sequence.routed_experts])
    return Datum(
        tokens=tokens[:-1], targets=tokens[1:].astype(np.int64), inputs=inputs, routed_experts=to_words(record)
    )


def _product_lines(
    setting: Setting, shape: dict[str, Any], least: float | None = None, aim: float | None = None
) -> list[Line]:
    """Forward and backward of a layer's experts, against dense products of as many FLOPs and the same sizes.

    `least` and `aim` are for the line without an adapter.
    """
    dtype = getattr(torch, setting.dtype)
    draw = torch.Generator().manual_seed(0)
    config = Qwen3MoeConfig(**shape)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    module = next(module for module in model.modules() if is_expert_stack(module))
    active: Any = SimpleNamespace(placed=())
    stack = next(iter(experts.install(model, active)))
    if compiled_adapters.work_on(torch.device("cpu"), dtype):
        stack.lay_out()  # as `autotune.reorder_weights` does
    k, hidden, width = config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size
    inputs = torch.randn(ROWS, hidden, generator=draw).to(dtype)
    chosen = torch.stack([torch.randperm(config.num_experts, generator=draw)[:k] for _ in range(ROWS)])
    weights = torch.rand(ROWS, k, generator=draw)
    layout = AdapterLayout(LoraSpec(rank=RANK, seed=0), tuple(expert_target(stack.name, module).sites))
    adapter = adapter_weights(layout, flat := layout.initial(), dtype)
    adapter.gradients = layout.pairs(torch.zeros_like(flat))
    up, down = (
        torch.randn(out, size, generator=draw).to(dtype) for out, size in ((2 * width, hidden), (hidden, width))
    )
    rows, narrow = (torch.randn(ROWS * k, size, generator=draw).to(dtype) for size in (hidden, width))
    wide = torch.randn(ROWS * k, 2 * width, generator=draw).to(dtype)

    def ours(placed: tuple[object, ...]) -> None:
        active.placed = placed
        leaf = inputs.clone().requires_grad_()
        output = module(leaf, chosen, weights.clone().requires_grad_())
        output.backward(output.detach())

    def dense() -> None:
        for left, right in ((rows, up.T), (narrow, down.T), (rows, down), (wide, up)):
            torch.mm(left, right)

    sides = {"dense": dense, "": lambda: ours(()), f", adapter of rank {RANK}": lambda: ours(((adapter, 0, ROWS),))}
    for side in sides.values():
        side()
    seconds = rotate(sides, 10 * setting.turns)
    return [
        Line(
            work=f"products of experts ({config.num_experts}, {k} for each of {ROWS} tokens, {hidden} x {width}{name})",
            baseline="dense products of the same sizes, forward and backward",
            unit="x",
            least=None if name else least,
            aim=None if name else aim,
            values=[theirs / own for theirs, own in zip(seconds["dense"], seconds[name], strict=True)],
        )
        for name in list(sides)[1:]
    ]
