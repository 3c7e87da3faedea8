"""Choices that depend on the hardware: weight layout, compilation, tokens of a micro-batch and of the KV cache.

Device and dtype are chosen in `model.loading`, precision in `model.precision`, the attention kernel in
`model.self_check`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine import model_facts
from tinsmith.engine.base import LoraSpec, ModelCard
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora import adapter, compiled_adapters, linear, matmul
from tinsmith.engine.lora.compiled_projections import fit
from tinsmith.engine.lora.experts.stack import stack_of
from tinsmith.engine.memory_plan import (
    GB,
    MAX_PASS_TOKENS,
    MIN_PASS_TOKENS,
    TOKENS_STEP,
    Gpu,
    MemoryPlan,
    ModelSizes,
    check_context,
    plan,
    vllm_alone,
)
from tinsmith.engine.model import flex_attention, loading, packing, self_check
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.memory import free_bytes
from tinsmith.engine.model.support import is_expert_stack
from tinsmith.engine_options import CPU_CACHE_TOKENS, PassTokens
from tinsmith.errors import ConfigError

log = logging.getLogger(__name__)

REORDER_MEMORY_SHARE = 4
"""A second layout of the weights may take one part in this many of the free memory; the first, all parts but one."""

ACTIVATION_MEMORY_SHARE = 4
"""A micro-batch's activations may take one part in this many of the free memory. Rows of twice its tokens run without
recomputing, and adapters, optimizer state and the KV cache need memory too."""

CACHE_MEMORY_SHARE, MIN_CACHE_TOKENS = 4, 2048
"""On a CPU, the KV cache may take one part in this many of the free memory, and always has room for so many tokens."""

DECODED_MEMORY_SHARE = 4
"""On a CPU, decoded matrices of a 4-bit model may take one part in this many of the free memory."""

MAX_TOKENS = {"cpu": 1024, "cuda": MAX_PASS_TOKENS}
"""More tokens gain nothing on a CPU, whose products are as fast with fewer rows; a GPU needs many at once."""

TRIAL_LENGTHS = (1, 36, 127, 128, 137, 385)
"""Tokens of the passes that compile attention: one token, less than a block of the mask, a block, and more."""

TRIAL_PREFIX, TRIAL_TURN = 300, 384
"""Cached tokens, and those of the pass after them: whole blocks of the mask, so that queries have fewer blocks than
keys in every window. Of equal sizes the compiler would assume that they always are."""

MEASURED_TOKENS = 64
"""Tokens of the pass that measures the activations."""


def reorder_weights(base: BaseModel, free: int) -> None:
    """On a CPU, lay the matrices of an adapted base out for its products, for compiled functions or for PyTorch's, if
    they fit in the `free` bytes."""
    every = (module.frozen for module in base.model.modules() if isinstance(module, linear.LoraLinear))
    matrices = [matrix for matrix in every if isinstance(matrix, matmul.FrozenLinear)]
    if compiled_adapters.work_on(base.device, base.dtype, checks=base.checks):
        fitting = [matrix for matrix in matrices if fit(matrix.shape)]
        if _lay_out(base, fitting, free):
            matrices = [matrix for matrix in matrices if not fit(matrix.shape)]
    copied = base.dtype.itemsize * sum(matrix.shape.numel() for matrix in matrices)
    if base.dtype == torch.bfloat16 and copied * REORDER_MEMORY_SHARE <= free:
        for matrix in matrices:
            matrix.reorder()


def _lay_out(base: BaseModel, matrices: Sequence[matmul.FrozenLinear], free: int) -> bool:
    """Lay matrices out for compiled functions, those of experts too, in place of what they are. Returns whether they
    fit in the free memory, of which the pages of a mapped file are a part.

    The transposed matrices, for gradients of inputs, are laid out too if they take a small part of the free memory;
    otherwise each gradient makes them again.
    """
    stacks = [stack_of(module) for module in base.model.modules() if is_expert_stack(module)]
    weights = sum(matrix.shape.numel() for matrix in matrices) + sum(stack.weight_count for stack in stacks)
    is_half = base.dtype == torch.float32 and any(matrix.is_half for matrix in matrices[:1])
    size = weights * (2 if is_half else base.dtype.itemsize)
    if is_half:
        free += 2 * size  # what the float32 weights take now: no file is mapped that has them
    parts = size * REORDER_MEMORY_SHARE
    if parts > free * (REORDER_MEMORY_SHARE - 1):
        return False
    backward = parts <= free
    for matrix in matrices:
        matrix.lay_out(backward=backward)
    for stack in stacks:
        stack.lay_out(backward=backward)
    return True


def compile_attention(base: BaseModel) -> BaseModel:
    """On a GPU, compile every variant of the final layers' attention now, so that no request waits for it.

    Returns the base, without FlexAttention if that does not compile.
    """
    if not base.flex_attention:
        return base
    log.info("Compiling the attention of %s: up to a minute", base.card.source)
    return self_check.compiled_or_without(base, _try_attention)


def _try_attention(base: BaseModel) -> None:
    """Passes of TRIAL_LENGTHS with and without gradients, and one after a cached prefix."""
    for length in TRIAL_LENGTHS:
        tree = _trial_tree(base, length)
        for with_grad in (True, False):
            with torch.set_grad_enabled(with_grad):
                hidden = base.hidden_of(tree)
                if with_grad:
                    hidden.float().sum().backward()
    if not base.latent_width:
        _try_after_prefix(base)


@torch.no_grad()
def _try_after_prefix(base: BaseModel) -> None:
    cached = min(TRIAL_PREFIX, base.card.context_length // 3)
    whole, prefix = _trial_tree(base, cached + TRIAL_TURN), _trial_tree(base, cached)
    before = flex_attention.packed_attention(prefix, base.device, save_kv=True)
    base.hidden_of(prefix, context=before)
    keys, values = (torch.cat(parts) for parts in zip(*before.saved_kv, strict=True))
    kv = flex_attention.CachedKV(np.arange(cached), lambda part: [(keys[:, :, part], values[:, :, part])])
    context = flex_attention.FlexAttention(whole, base.device, cached=kv)
    base.hidden_of(_trial_tree(base, len(whole.tokens) - cached), context=context)


def _trial_tree(base: BaseModel, length: int) -> packing.PackedTree:
    """A row of that length, or of the whole context."""
    tokens = np.arange(min(length, base.card.context_length), dtype=np.int32) % base.card.vocab_size
    return packing.pack([packing.PackedRow(key=0, adapter=0, tokens=tokens)])


def resolve_pass_tokens(setting: PassTokens, base: BaseModel, active: linear.ActiveAdapters, at_once: int = 1) -> int:
    """The setting itself or, for `auto`, what fits into memory with `at_once` micro-batches at the same time; `base` is
    adapted, with its final layers."""
    if setting != "auto":
        return setting
    free = torch.cuda.mem_get_info(base.device)[0] if base.device.type == "cuda" else free_bytes()
    each = base.checks.result("activation bytes", lambda: activation_bytes_per_token(base, active))
    return tokens_that_fit(free, at_once * each, MAX_TOKENS[base.device.type])


def check_memory(config: EngineConfig) -> None:
    """Plan the memory of the GPU before anything is read. Raises ConfigError, with the numbers, for what does not
    fit."""
    device = loading.device_of(config.device)
    if device.type == "cpu" and config.vllm_place == "beside" and config.vllm.sleep is True:
        raise ConfigError("vllm.sleep: vLLM has no sleep mode on a CPU.", "Leave it out.")
    if device.type == "cuda" and config.check_memory:
        facts = model_facts.read_facts(config, loading.dtype_of(config.dtype, device))
        check_host(planned(config, model_facts.gpu_of(device), facts), free_bytes())


def check_host(memory: MemoryPlan, free: int) -> None:
    """Raises ConfigError if a vLLM that sleeps has no room for its weights in the machine's memory."""
    vllm = memory.vllm
    if vllm is not None and vllm.asleep is not None and vllm.weights + vllm.adapters > free:
        raise ConfigError(
            f"vLLM for {memory.facts.source} cannot sleep: its weights and adapters take "
            f"{(vllm.weights + vllm.adapters) / GB:.1f} GB, and {free / GB:.1f} GB of the machine's memory are free.",
            "Free memory, give vLLM a GPU of its own (vllm.devices), or use sampler=torch; check_memory=false loads "
            "it anyway.",
        )


def planned(config: EngineConfig, gpu: Gpu, facts: ModelSizes) -> MemoryPlan:
    """The plan of a GPU, with those of the GPUs that only sample, which are taken to be like this one. Raises
    ConfigError, with the numbers, for what does not fit."""
    divided = plan(gpu, facts, model_facts.plan_settings(config))
    if config.vllm_place == "apart":
        divided = replace(divided, vllm_apart=vllm_alone(gpu, facts, model_facts.vllm_settings(config)))
    elif config.part == "training":
        replica = config.model_copy(update={"part": "sampling", "shards": 1})
        sampler = replace(plan(gpu, facts, model_facts.plan_settings(replica)), role="each sampling process")
        divided = replace(divided, sampler=sampler)
    return divided


def memory_plan(config: EngineConfig, base: BaseModel, active: linear.ActiveAdapters) -> MemoryPlan | None:
    """The plan of a loaded model's GPU, with measured sizes; None on a CPU, and for what does not fit without
    `check_memory`."""
    if base.device.type != "cuda":
        return None
    facts = model_facts.facts_of(
        base.card.source,
        base.model.config,
        base.dtype,
        four_bit=config.quantize == "4bit",
        recompute=config.recompute == "always",
    )
    facts = replace(facts, loading_bytes=0)
    if config.shards == 1:  # slices are gathered while a layer computes: their sizes are computed
        measured = activation_bytes_per_token(base, active)
        facts = replace(facts, weight_bytes=base.card.weight_bytes, activation_bytes=measured)
    try:
        made = planned(config, model_facts.gpu_of(base.device), facts)
        check_host(made, free_bytes())
    except ConfigError:
        if config.check_memory:
            raise
        return None
    return made


def decoded_bytes(base: BaseModel, memory: MemoryPlan | None) -> int:
    """Memory for decoded matrices of a 4-bit model: what the plan says or, without one, a share of what is free on a
    CPU. The results have the same bits with any."""
    if base.device.type == "cuda":
        return 0 if memory is None else memory.decoded
    return free_bytes() // DECODED_MEMORY_SHARE


def resolve_cache_tokens(config: EngineConfig, memory: MemoryPlan | None, token_bytes: int) -> int:
    """The setting itself or, for `auto`, what the plan says; without one, what a CPU has, or less if a share of the
    free memory does not hold it. `token_bytes` are those of a token's keys and values, 0 if they are not known."""
    if config.cache_tokens != "auto":
        return config.cache_tokens
    if memory is not None:
        return memory.cache_tokens
    if config.deterministic or not token_bytes:
        return CPU_CACHE_TOKENS
    return min(CPU_CACHE_TOKENS, max(MIN_CACHE_TOKENS, free_bytes() // CACHE_MEMORY_SHARE // token_bytes))


def vllm_context(config: EngineConfig, card: ModelCard, memory: MemoryPlan | None) -> int:
    """Longest row that vLLM samples; 0 for the whole context. Raises ConfigError for more than that."""
    whole = card.original_context or card.context_length
    setting = None if config.vllm.context == "auto" else config.vllm.context
    check_context(card.source, setting, whole)
    vllm = memory.vllm or memory.vllm_apart if memory is not None else None
    context = vllm.context if vllm is not None else setting or whole
    return context if context < whole else 0


def tokens_that_fit(free: int, bytes_per_token: float, most: int) -> int:
    """Tokens that fit into the activations' share of `free` bytes, a multiple of TOKENS_STEP within the bounds."""
    fitting = int(free / ACTIVATION_MEMORY_SHARE / bytes_per_token) // TOKENS_STEP * TOKENS_STEP
    return min(max(fitting, MIN_PASS_TOKENS), most)


def activation_bytes_per_token(base: BaseModel, active: linear.ActiveAdapters) -> float:
    """Bytes that the backward of one token keeps, in the layers and in the head.

    Measured in a small pass under an adapter, so that it holds for whatever modules and kernels are in use.
    """
    layout = linear.layout_for(base, LoraSpec(rank=8, seed=0, train_unembed=False))
    flat = layout.initial().to(base.device)
    weights = adapter.adapter_weights(layout, flat, base.dtype)
    weights.gradients = layout.pairs(flat)  # never written: there is no backward
    count = min(MEASURED_TOKENS, base.card.context_length)
    tokens = np.arange(count, dtype=np.int32) % base.card.vocab_size
    tree = packing.pack([packing.PackedRow(key=0, adapter=0, tokens=tokens)])
    parameters = (*base.model.parameters(), base.head, *_tensors(weights))
    stored = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        active.using(adapter.place_adapters(tree.spans, [weights])),
    ):
        hidden = base.hidden_of(tree)
    del hidden  # alive until here, so that no address was reused and counted once for two tensors
    body = sum(size for address, size in saved.items() if address not in stored)
    return body / count + base.card.vocab_size * base.dtype.itemsize


def _tensors(weights: adapter.AdapterWeights) -> list[Tensor]:
    return [tensor for pair in weights.pairs.values() for tensor in (pair.a, pair.b)]
