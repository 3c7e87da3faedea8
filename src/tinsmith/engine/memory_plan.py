"""How the memory of a GPU is divided among the parts of a service. Arithmetic on records; imports no torch.

First come the parts whose size is given: the reserve, the weights, stacked adapters, what vLLM holds beside its cache,
and whatever the settings fix. The rest is divided among vLLM's KV cache, activations, this engine's KV cache and the
models in training. The memory of a vLLM that sleeps while the trainer computes is that of the activations too. What
does not fit is refused with all the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from tinsmith.errors import ConfigError

GB = 10**9
RESERVE_BYTES, RESERVE_SHARE = 600 * 10**6, 50
"""Of a GPU for CUDA's context and kernels, and one part in so many of it for gaps between allocations."""

ACTIVATION_SHARE = 2
"""Activations may take one part in this many of what is divided. A row of two micro-batches runs without recomputing,
so a micro-batch has half of that."""
LONGEST_PASSES = 2
"""Micro-batches whose activations are in memory at once, as a row of that length."""
PROMPT_LAYERS = 2
"""Activations of a prompt without gradients, in those that a layer keeps for a backward."""
TOKENS_STEP, MIN_PASS_TOKENS, MAX_PASS_TOKENS = 128, 256, 8192
CACHE_STEP = 4096
"""A KV cache holds a multiple of so many tokens, and at least as many."""
STACK_BYTES = 2**30
"""Most memory of the matrices of a pass's adapters that are stacked for grouped products."""
SLOT_BYTES, SLOT_SHARE = 2**31, 64
"""Most memory of the adapters of a decoding step, which are copied into slots: also one part in so many of a GPU."""
GATHERED_LAYERS = 2
"""Layers of a sharded model that are whole on a GPU at once: one computes while the next is gathered."""
BYTES_PER_PARAMETER = 16
"""Of a model in training after its first step: the weight, its gradient and two moments in float32."""
LEAST_RANK = 32
"""There must be room for one model of this rank in training."""

VLLM_CACHE_SHARE, VLLM_MAX_SHARE = 3, 2
"""vLLM's KV cache beside a trainer has one part in 3 of what is divided, or up to one in 2 where a context needs it."""
VLLM_ALONE_SHARE = 0.9
"""Of a GPU that vLLM has for itself; vLLM's own default."""
MIN_AWAKE_TOKENS = 512
"""vLLM sleeps by itself while the trainer computes, rather than leave it smaller micro-batches."""
VLLM_BLOCK = 16
"""Tokens of a block of vLLM's KV cache."""
VLLM_LEAST_CONTEXT = 2048
"""A shorter context than this, or than the model's own if that is less, is refused unless it is set."""
VLLM_BYTES, VLLM_GRAPH_BYTES = 500 * 10**6, 750 * 10**6
"""Of vLLM for its CUDA context and buffers, and for CUDA graphs: assumed, not measured."""
LARGE_GPU = 70 * 2**30
"""From this size on, vLLM takes more tokens and sequences in a step by default. Cards with grouped products are at
least as large."""
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
    has_grouped_products: bool | None = None
    """Whether adapters are stacked for grouped products; None where only the size is known."""

    @property
    def stacks(self) -> bool:
        """Whether memory is reserved for stacked adapters."""
        return self.total_bytes >= LARGE_GPU if self.has_grouped_products is None else self.has_grouped_products


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What the plan reads of a base model."""

    source: str
    weight_bytes: int
    loading_bytes: int
    """On top of the weights while the model is loaded and checked: float32 copies, which are gone before anything
    else is in memory."""
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
    stack_bytes: int
    """Of stacked adapters, on a GPU with grouped products."""
    layer_weight_bytes: int
    """Projections of a layer, on average: what a sharded model divides."""
    layers: int
    decoded_layers: int = 0
    """Layers of a 4-bit model whose projections are in memory as they are multiplied."""
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
    sleep: bool | None = False
    """Whether it gives its memory back while the trainer computes; None: if they do not fit beside each other, or only
    with micro-batches under MIN_AWAKE_TOKENS."""


Samples = Literal["all", "questions", "none"]
"""What an engine samples: everything, or only what its vLLM does not."""


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
    trains: bool = True
    samples: Samples = "all"
    shards: int = 1
    """GPUs that hold a slice of the model each."""


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
    asleep: int | None = None
    """What it keeps of that while the trainer computes; None if it does not sleep."""

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
    stacks: int
    """Stacked adapters."""
    slots: int
    """Adapters of a decoding step."""
    decoded: int
    """Matrices of a 4-bit model that stay decoded from a forward to its backward."""
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
    sampler: MemoryPlan | None = None
    """Of each of the GPUs of sampling processes, where the training processes do not sample."""
    role: str = ""
    """What the process on this GPU is, where it is one of several."""

    @property
    def sampling_tokens(self) -> int:
        """Tokens of the KV cache that samples are drawn with, in each process that draws any."""
        vllm = self.vllm or self.vllm_apart
        if vllm is not None:
            return vllm.cache_tokens
        return self.cache_tokens if self.sampler is None else self.sampler.cache_tokens

    @property
    def total(self) -> int:
        """The most that is in memory at a time."""
        adapters = self.stacks + self.slots + self.models
        own = self.reserve + self.weights + adapters + self.decoded + self.cache
        if self.vllm is None:
            return own + self.activations
        if self.vllm.asleep is None:
            return own + self.activations + self.vllm.total
        return own + max(self.activations + self.vllm.asleep, self.vllm.total)

    def lines(self) -> Iterator[tuple[str, int, str]]:
        """(part, bytes, what that is enough for), for people."""
        yield "reserve", self.reserve, "CUDA's context and kernels, gaps"
        yield "weights", self.weights, self.facts.source
        if self.stacks:
            yield "adapter stacks", self.stacks, "matrices of a pass's adapters, for grouped products"
        if self.slots:
            yield "adapter slots", self.slots, "adapters of a decoding step"
        if self.decoded:
            yield "decoded weights", self.decoded, "a layer's, from its forward to its backward"
        yield "activations", self.activations, f"pass_tokens {self.pass_tokens:,}"
        yield "KV cache", self.cache, f"cache_tokens {self.cache_tokens:,}"
        each = BYTES_PER_PARAMETER * LEAST_RANK * self.facts.parameters_per_rank
        enough = f"{self.models // each:,} of rank {LEAST_RANK} at a time" if each else ""
        if self.models:
            yield "models in training", self.models, enough
        if (vllm := self.vllm or self.vllm_apart) is not None:
            yield "vLLM weights", vllm.weights, "a copy of its own" if self.vllm else "on GPUs of its own"
            yield "vLLM adapters", vllm.adapters, "LoRA slots"
            yield "vLLM working", vllm.working, "activations, logits, CUDA graphs: assumed"
            yield "vLLM KV cache", vllm.cache, f"{vllm.cache_tokens:,} tokens, context {vllm.context:,}"
            if vllm.asleep is not None:
                yield "vLLM asleep", vllm.asleep, "all that it keeps while the trainer has activations"


def plan(gpu: Gpu, facts: ModelSizes, settings: PlanSettings) -> MemoryPlan:
    """Divide a GPU. Raises ConfigError, with the numbers, if the parts do not fit."""
    if settings.shards > 1:
        facts = _slice_of(facts, settings.shards)
    if settings.vllm is None:
        return _plan(gpu, facts, settings, None)
    vllm = settings.vllm
    if vllm.sleep is None:
        with suppress(ConfigError):
            awake = _plan(gpu, facts, settings, replace(vllm, sleep=False))
            if settings.pass_tokens or awake.pass_tokens >= MIN_AWAKE_TOKENS:
                return awake
    return _plan(gpu, facts, settings, replace(vllm, sleep=vllm.sleep is not False))


def _plan(gpu: Gpu, facts: ModelSizes, settings: PlanSettings, beside: VllmSettings | None) -> MemoryPlan:
    """The plan with a vLLM `beside` the engine, or without one."""
    available = min(gpu.free_bytes, gpu.total_bytes // settings.engines)
    reserve = RESERVE_BYTES + gpu.total_bytes // settings.engines // RESERVE_SHARE
    stacks = facts.stack_bytes if gpu.stacks else 0
    least = _least(facts, settings)
    fixed = {"reserve": reserve, "weights": facts.weight_bytes}
    rest = available - sum(fixed.values())
    if rest < facts.loading_bytes:
        fixed["float32 copies while it is loaded"] = facts.loading_bytes
        raise _does_not_fit(gpu, facts, available, fixed, settings)
    slots = slot_bytes(gpu.total_bytes) if settings.samples != "none" else 0
    decoded = facts.decoded_layers * facts.layer_weight_bytes
    copies = {"adapter stacks": stacks, "adapter slots": slots, "decoded weights": decoded}
    fixed |= {name: size for name, size in copies.items() if size}
    rest -= sum(copies.values())
    vllm = None
    if beside is not None and beside.sleep:
        activations, *others = least.items()
        vllm = _vllm_beside(gpu, facts, beside, rest - sum(size for _, size in others), rest)
        vllm = replace(vllm, asleep=_vllm_asleep(beside))
        in_turns = max(vllm.total, activations[1] + _vllm_asleep(beside))
        name = f"vLLM with a context of {vllm.context:,} or, in turns with it, {activations[0]}"
        fixed, least, rest = fixed | {name: in_turns}, dict(others), rest - in_turns
        room = in_turns - _vllm_asleep(beside)
    elif beside is not None:
        vllm = _vllm_beside(gpu, facts, beside, rest - sum(least.values()), rest)
        held = {
            "vLLM weights": vllm.weights,
            "vLLM adapters": vllm.adapters,
            "vLLM activations and graphs": vllm.working,
        }
        fixed |= held | {f"vLLM KV cache for a context of {vllm.context:,}": vllm.cache}
        rest, room = rest - vllm.total, None
    else:
        room = None
    if rest < sum(least.values()):
        raise _does_not_fit(gpu, facts, available, fixed | least, settings)
    return _divided(
        gpu,
        facts,
        settings,
        available=available,
        reserve=reserve,
        stacks=stacks,
        slots=slots,
        decoded=decoded,
        rest=rest,
        room=room,
        vllm=vllm,
    )


def slot_bytes(total_bytes: int) -> int:
    """Most memory of the adapters of a decoding step on a GPU of so many bytes."""
    return min(SLOT_BYTES, total_bytes // SLOT_SHARE)


def _slice_of(facts: ModelSizes, shards: int) -> ModelSizes:
    """The facts of one of the GPUs that share a model: slices of the projections, and the layers that compute."""
    whole = facts.layers * facts.layer_weight_bytes
    gathered = min(GATHERED_LAYERS, facts.layers) * facts.layer_weight_bytes
    weights = facts.weight_bytes - whole + -(-whole // shards) + gathered
    return replace(facts, weight_bytes=weights, loading_bytes=0)  # its slices are read as they are


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
    models = model if settings.model_bytes is None else settings.model_bytes
    return {
        f"activations (pass_tokens {passes:,})": int(passes * _pass_bytes(facts, settings)),
        f"KV cache (cache_tokens {tokens:,})": tokens * facts.token_bytes + facts.state_bytes,
        "models in training": models if settings.trains else 0,
    }


def _pass_bytes(facts: ModelSizes, settings: PlanSettings) -> float:
    """Activations for each token of a micro-batch, or of a prompt in an engine that does not train: nothing is kept
    for a backward there."""
    return LONGEST_PASSES * facts.activation_bytes if settings.trains else PROMPT_LAYERS * facts.layer_bytes


def _divided(
    gpu: Gpu,
    facts: ModelSizes,
    settings: PlanSettings,
    *,
    available: int,
    reserve: int,
    stacks: int,
    slots: int,
    decoded: int,
    rest: int,
    room: int | None,
    vllm: VllmPlan | None,
) -> MemoryPlan:
    """The plan whose `rest` goes to activations, KV cache and models, each at least as large as `_least` says.

    `room`: for activations, in turns with a vLLM that sleeps; None if they are in the `rest`.
    """
    activations, cache, models = _least(facts, settings).values()
    spare = rest - cache - models - (activations if room is None else 0)  # beyond the smallest sizes
    pass_tokens = settings.pass_tokens
    if pass_tokens is None:
        bytes_per_token = _pass_bytes(facts, settings)
        most = room or min(max(activations, rest // ACTIVATION_SHARE), activations + spare)
        pass_tokens = min(int(most / bytes_per_token), MAX_PASS_TOKENS) // TOKENS_STEP * TOKENS_STEP
        pass_tokens = max(pass_tokens, MIN_PASS_TOKENS)
        spare += 0 if room is not None else activations - int(pass_tokens * bytes_per_token)
        activations = int(pass_tokens * bytes_per_token)
    cache_tokens = settings.cache_tokens
    if cache_tokens is None:
        share = spare if settings.model_bytes is not None or not settings.trains else spare // 2
        cache_tokens = (cache - facts.state_bytes + share) // facts.token_bytes
        if settings.samples != "all":  # rows of one context, or nothing
            longest = facts.context_length if settings.samples == "questions" else 1
            cache_tokens = min(cache_tokens, max(CACHE_STEP, -(-longest // CACHE_STEP) * CACHE_STEP))
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
        stacks=stacks,
        slots=slots,
        decoded=decoded,
        activations=activations,
        cache=cache,
        models=models + spare if settings.model_bytes is None and settings.trains else models,
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
    tokens, sequences = VLLM_STEP[gpu.total_bytes >= LARGE_GPU]
    slots = settings.adapters * settings.rank * facts.vllm_parameters_per_rank * 2
    working = VLLM_BYTES + VLLM_GRAPH_BYTES * settings.graphs
    working += int(tokens * facts.layer_bytes) + sequences * facts.vocab_size * VLLM_LOGIT_BYTES
    return facts.vllm_weight_bytes // settings.gpus, slots // settings.gpus, working


def _vllm_asleep(settings: VllmSettings) -> int:
    """What a vLLM that sleeps keeps: its context, and its CUDA graphs."""
    return VLLM_BYTES + VLLM_GRAPH_BYTES * settings.graphs


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
        own = "sampler=torch, a GPU of its own for vLLM (vllm.devices)"
        ways[-2] = own if settings.vllm.sleep is not False else f"vllm.sleep=true, {own}"  # vLLM has whole weights
    return ConfigError(
        f"{facts.source} does not fit on {gpu.name}: {_gb(available)} of {_gb(gpu.total_bytes)} are free for it, and "
        f"at least {_gb(sum(parts.values()))} are needed: {listed}.",
        f"Use {', '.join(ways)}, or check_memory=false to try it anyway.",
    )


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB"
