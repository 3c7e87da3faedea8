"""How the memory of a GPU is divided among the parts of a service. Arithmetic on records; imports no torch.

First come the parts whose size is given: the reserve, the weights, what vLLM holds beside its cache, and whatever the
settings fix. The rest is divided among vLLM's KV cache, activations, this engine's KV cache and the models in training.
What does not fit is refused with all the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tinsmith.errors import ConfigError

GB = 10**9
RESERVE_BYTES, RESERVE_SHARE = 600 * 10**6, 50
"""Of a GPU for CUDA's context and kernels, and one part in so many of it for gaps between allocations."""

ACTIVATION_SHARE = 2
"""Activations may take one part in this many of what is divided. A row of two micro-batches runs without recomputing,
so a micro-batch has half of that."""
LONGEST_PASSES = 2
"""Micro-batches whose activations are in memory at once, as a row of that length."""
TOKENS_STEP, MIN_PASS_TOKENS, MAX_PASS_TOKENS = 128, 256, 8192
CACHE_STEP = 4096
"""A KV cache holds a multiple of so many tokens, and at least as many."""
BYTES_PER_PARAMETER = 16
"""Of a model in training after its first step: the weight, its gradient and two moments in float32."""
LEAST_RANK = 32
"""There must be room for one model of this rank in training."""

VLLM_CACHE_SHARE, VLLM_MAX_SHARE = 3, 2
"""vLLM's KV cache beside a trainer has one part in 3 of what is divided, or up to one in 2 where a context needs it."""
VLLM_ALONE_SHARE = 0.9
"""Of a GPU that vLLM has for itself; vLLM's own default."""
VLLM_BLOCK = 16
"""Tokens of a block of vLLM's KV cache."""
VLLM_LEAST_CONTEXT = 2048
"""A shorter context than this, or than the model's own if that is less, is refused unless it is set."""
VLLM_BYTES, VLLM_GRAPH_BYTES = 500 * 10**6, 750 * 10**6
"""Of vLLM for its CUDA context and buffers, and for CUDA graphs: assumed, not measured."""
VLLM_LARGE_GPU = 70 * 2**30
"""From this size on, vLLM takes more tokens and sequences in a step by default."""
VLLM_STEP = {True: (8192, 1024), False: (2048, 256)}
"""Tokens and sequences of a step on a large GPU, and on others."""
VLLM_LOGIT_BYTES = 12
"""Of each logit while vLLM samples: three float32 copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as an engine finds it."""

    name: str
    total_bytes: int
    free_bytes: int
    """Without what the engine itself has allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What the plan reads of a base model."""

    source: str
    weight_bytes: int
    head_bytes: int
    """float32 copies of the output head, or of one module while the model is checked."""
    token_bytes: int
    """Keys and values of a token in all layers."""
    state_bytes: int
    """States of a sequence in recurrent layers."""
    activation_bytes: float
    """What the backward of a token keeps."""
    layer_bytes: float
    """What a layer keeps of a token, if nothing is recomputed."""
    vocab_size: int
    context_length: int
    parameters_per_rank: int
    """Of an adapter on everything."""
    vllm_weight_bytes: int
    """Of vLLM's own copy: as stored, with its head in float32."""
    vllm_parameters_per_rank: int
    """In vLLM each expert has both matrices of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What the plan reads of vLLM's settings."""

    rank: int = 32
    adapters: int = 8
    memory: float | None = None
    """Share of the GPU; None for what the plan finds."""
    context: int | None = None
    """None for the model's own, or what fits."""
    graphs: bool = True
    gpus: int = 1
    """GPUs that hold a part of the model each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Sizes that the settings fix; None: the plan finds them."""

    pass_tokens: int | None = None
    cache_tokens: int | None = None
    model_bytes: int | None = None
    vllm: VllmSettings | None = None
    """Of a vLLM on the same GPU; None without one."""
    engines: int = 1
    """Engines that share the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPlan:
    """vLLM on a GPU: it starts only if its cache holds one whole context."""

    weights: int
    adapters: int
    """LoRA slots."""
    working: int
    """Activations, logits and graphs."""
    cache: int
    cache_tokens: int
    context: int
    share: float
    """Of the GPU: `--gpu-memory-utilization`."""

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.working + self.cache


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The parts of a GPU's memory in bytes, and the sizes that follow from them."""

    gpu: Gpu
    facts: ModelSizes
    available: int
    """Of the GPU for this engine."""
    reserve: int
    weights: int
    head: int
    activations: int
    cache: int
    models: int
    """For models in training."""
    pass_tokens: int
    cache_tokens: int
    vllm: VllmPlan | None = None
    """On this GPU."""
    vllm_apart: VllmPlan | None = None
    """On each of the GPUs that vLLM has for itself."""

    @property
    def total(self) -> int:
        own = self.reserve + self.weights + self.head + self.activations + self.cache + self.models
        return own + (self.vllm.total if self.vllm else 0)

    def lines(self) -> Iterator[tuple[str, int, str]]:
        """(part, bytes, what that is enough for), for people."""
        yield "reserve", self.reserve, "CUDA's context and kernels, gaps"
        yield "weights", self.weights, self.facts.source
        yield "head", self.head, "float32 copies while the model is loaded and checked"
        yield "activations", self.activations, f"pass_tokens {self.pass_tokens:,}"
        yield "KV cache", self.cache, f"cache_tokens {self.cache_tokens:,}"
        each = BYTES_PER_PARAMETER * LEAST_RANK * self.facts.parameters_per_rank
        enough = f"{self.models // each:,} of rank {LEAST_RANK} at a time" if each else ""
        yield "models in training", self.models, enough
        if (vllm := self.vllm or self.vllm_apart) is not None:
            yield "vLLM weights", vllm.weights, "a copy of its own" if self.vllm else "on GPUs of its own"
            yield "vLLM adapters", vllm.adapters, "LoRA slots"
            yield "vLLM working", vllm.working, "activations, logits, CUDA graphs: assumed"
            yield "vLLM KV cache", vllm.cache, f"{vllm.cache_tokens:,} tokens, context {vllm.context:,}"


def plan(gpu: Gpu, facts: ModelSizes, settings: PlanSettings) -> MemoryPlan:
    """Divide a GPU. Raises ConfigError, with the numbers, if the parts do not fit."""
    available = min(gpu.free_bytes, gpu.total_bytes // settings.engines)
    reserve = RESERVE_BYTES + gpu.total_bytes // settings.engines // RESERVE_SHARE
    least = _least(facts, settings)
    fixed = {"reserve": reserve, "weights": facts.weight_bytes, "output head": facts.head_bytes}
    rest = available - sum(fixed.values())
    vllm = None
    if settings.vllm is not None:
        vllm = _vllm_beside(gpu, facts, settings.vllm, rest - sum(least.values()), rest)
        held = {
            "vLLM weights": vllm.weights,
            "vLLM adapters": vllm.adapters,
            "vLLM activations and graphs": vllm.working,
        }
        fixed |= held | {f"vLLM KV cache for a context of {vllm.context:,}": vllm.cache}
        rest -= vllm.total
    if rest < sum(least.values()):
        raise _does_not_fit(gpu, facts, available, fixed | least, settings)
    return _divided(gpu, facts, settings, available=available, reserve=reserve, rest=rest, vllm=vllm)


def vllm_alone(gpu: Gpu, facts: ModelSizes, settings: VllmSettings) -> VllmPlan:
    """The plan of a vLLM that has a GPU like this one, or several, for itself. Raises ConfigError if it cannot
    start."""
    share = VLLM_ALONE_SHARE if settings.memory is None else settings.memory
    return _vllm_in_share(gpu, facts, settings, share)


def check_context(source: str, context: int | None, longest: int) -> None:
    """Raise ConfigError for a `vllm.context` that is longer than the model's."""
    if context is not None and context > longest:
        raise ConfigError(
            f"vllm.context is {context:,}, and {source} has a context of {longest:,}.",
            f"Set vllm.context to {longest} or less, or to auto.",
        )


def _least(facts: ModelSizes, settings: PlanSettings) -> dict[str, int]:
    """The sizes that the settings fix, and the smallest of the others."""
    passes = settings.pass_tokens or MIN_PASS_TOKENS
    tokens = settings.cache_tokens or min(CACHE_STEP, facts.context_length)
    model = BYTES_PER_PARAMETER * LEAST_RANK * facts.parameters_per_rank
    return {
        f"activations (pass_tokens {passes:,})": int(LONGEST_PASSES * passes * facts.activation_bytes),
        f"KV cache (cache_tokens {tokens:,})": tokens * facts.token_bytes + facts.state_bytes,
        "models in training": model if settings.model_bytes is None else settings.model_bytes,
    }


def _divided(
    gpu: Gpu,
    facts: ModelSizes,
    settings: PlanSettings,
    *,
    available: int,
    reserve: int,
    rest: int,
    vllm: VllmPlan | None,
) -> MemoryPlan:
    """The plan whose `rest` goes to activations, KV cache and models, each at least as large as `_least` says."""
    activations, cache, models = _least(facts, settings).values()
    spare = rest - activations - cache - models  # beyond the smallest sizes
    pass_tokens = settings.pass_tokens
    if pass_tokens is None:
        bytes_per_token = LONGEST_PASSES * facts.activation_bytes
        fitting = int((activations + max(0, rest // ACTIVATION_SHARE - activations)) / bytes_per_token)
        most = int((activations + spare) / bytes_per_token)
        pass_tokens = min(fitting, most, MAX_PASS_TOKENS) // TOKENS_STEP * TOKENS_STEP
        pass_tokens = max(pass_tokens, MIN_PASS_TOKENS)
        spare += activations - int(pass_tokens * bytes_per_token)
        activations = int(pass_tokens * bytes_per_token)
    cache_tokens = settings.cache_tokens
    if cache_tokens is None:
        share = spare if settings.model_bytes is not None else spare // 2
        cache_tokens = (cache - facts.state_bytes + share) // facts.token_bytes
        if vllm is not None:  # this engine's sampler then answers the questions about prompts only
            cache_tokens = min(cache_tokens, max(CACHE_STEP, -(-facts.context_length // CACHE_STEP) * CACHE_STEP))
        if cache_tokens > CACHE_STEP:
            cache_tokens = cache_tokens // CACHE_STEP * CACHE_STEP
        spare += cache - facts.state_bytes - cache_tokens * facts.token_bytes
        cache = cache_tokens * facts.token_bytes + facts.state_bytes
    return MemoryPlan(
        gpu=gpu,
        facts=facts,
        available=available,
        reserve=reserve,
        weights=facts.weight_bytes,
        head=facts.head_bytes,
        activations=activations,
        cache=cache,
        models=models + spare if settings.model_bytes is None else models,
        pass_tokens=pass_tokens,
        cache_tokens=cache_tokens,
        vllm=vllm,
    )


def _vllm_beside(gpu: Gpu, facts: ModelSizes, settings: VllmSettings, most: int, rest: int) -> VllmPlan:
    """vLLM beside a trainer, in the `most` bytes that the trainer can spare out of `rest`. Raises ConfigError if vLLM
    needs more than a set share."""
    if settings.memory is not None:
        return _vllm_in_share(gpu, facts, settings, settings.memory)
    check_context(facts.source, settings.context, facts.context_length)
    held = _vllm_held(gpu, facts, settings)
    divided = rest - sum(held)
    whole = _context_bytes(facts, settings, settings.context or facts.context_length)
    least = _context_bytes(facts, settings, settings.context or min(facts.context_length, VLLM_LEAST_CONTEXT))
    cache = max(divided // VLLM_CACHE_SHARE, min(divided // VLLM_MAX_SHARE, whole), least)
    return _vllm(gpu, facts, settings, held, max(least, min(cache, most - sum(held))), None)


def _vllm_in_share(gpu: Gpu, facts: ModelSizes, settings: VllmSettings, share: float) -> VllmPlan:
    """vLLM in a set share of the GPU. Raises ConfigError if one context does not fit into its cache there."""
    check_context(facts.source, settings.context, facts.context_length)
    held = _vllm_held(gpu, facts, settings)
    total = int(share * gpu.total_bytes)
    cache = total - sum(held)
    wanted = settings.context or min(facts.context_length, VLLM_LEAST_CONTEXT)
    needed = _context_bytes(facts, settings, wanted)
    if cache < needed:
        weights, adapters, working = held
        raise ConfigError(
            f"vLLM for {facts.source} does not fit: {share:g} of {gpu.name} is {_gb(total)}; its weights take "
            f"{_gb(weights)}, {settings.adapters} adapters of rank {settings.rank} {_gb(adapters)}, activations and "
            f"graphs about {_gb(working)}, and the KV cache of one context of {wanted:,} tokens {_gb(needed)}: "
            f"{_gb(sum(held) + needed)}.",
            "Raise vllm.memory or leave it at auto; lower vllm.context, vllm.adapters or vllm.rank; or give vLLM a GPU "
            "of its own (vllm.devices).",
        )
    return _vllm(gpu, facts, settings, held, cache, share)


def _vllm_held(gpu: Gpu, facts: ModelSizes, settings: VllmSettings) -> tuple[int, int, int]:
    """Bytes of vLLM on each of its GPUs for weights, LoRA slots and work, whatever its cache."""
    tokens, sequences = VLLM_STEP[gpu.total_bytes >= VLLM_LARGE_GPU]
    slots = settings.adapters * settings.rank * facts.vllm_parameters_per_rank * 2
    working = VLLM_BYTES + VLLM_GRAPH_BYTES * settings.graphs
    working += int(tokens * facts.layer_bytes) + sequences * facts.vocab_size * VLLM_LOGIT_BYTES
    return facts.vllm_weight_bytes // settings.gpus, slots // settings.gpus, working


def _context_bytes(facts: ModelSizes, settings: VllmSettings, context: int) -> int:
    """Bytes of vLLM's KV cache on each of its GPUs for one context: whole blocks."""
    return -(-context // VLLM_BLOCK) * VLLM_BLOCK * facts.token_bytes // settings.gpus + facts.state_bytes


def _vllm(
    gpu: Gpu, facts: ModelSizes, settings: VllmSettings, held: tuple[int, int, int], cache: int, share: float | None
) -> VllmPlan:
    weights, adapters, working = held
    tokens = (cache - facts.state_bytes) * settings.gpus // facts.token_bytes // VLLM_BLOCK * VLLM_BLOCK
    total = sum(held) + cache
    return VllmPlan(
        weights=weights,
        adapters=adapters,
        working=working,
        cache=cache,
        cache_tokens=tokens,
        context=settings.context or min(facts.context_length, tokens),
        share=min(total / gpu.total_bytes, 0.99) if share is None else share,
    )


def _does_not_fit(
    gpu: Gpu, facts: ModelSizes, available: int, parts: dict[str, int], settings: PlanSettings
) -> ConfigError:
    listed = ", ".join(f"{part} {_gb(size)}" for part, size in parts.items())
    ways = ["recompute=always", "quantize=4bit", "a smaller model"]
    if settings.pass_tokens or settings.cache_tokens or settings.model_bytes:
        ways.insert(0, "smaller pass_tokens, cache_tokens or model_memory")
    if settings.vllm is not None:
        ways[1] = "sampler=torch, a GPU of its own for vLLM (vllm.devices)"  # vLLM has the weights as they are
    return ConfigError(
        f"{facts.source} does not fit on {gpu.name}: {_gb(available)} of {_gb(gpu.total_bytes)} are free for it, and "
        f"at least {_gb(sum(parts.values()))} are needed: {listed}.",
        f"Use {', '.join(ways)}, or check_memory=false to try it anyway.",
    )


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB"
