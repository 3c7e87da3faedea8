"""The engine in plain PyTorch, on CPU or GPU: a trainer and a sampler that share one base model, in one process.

The two take turns on the device: the trainer yields between micro-batches, the sampler between tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from typing_extensions import override

from tinsmith.engine import autotune, model_facts
from tinsmith.engine.base import (
    LoraSpec,
    ModelCard,
    OnDelta,
    Pass,
    PassResult,
    SampleRequest,
    SampleResult,
    SavedAdapter,
    folder_of,
)
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.device_sharing import POLICIES, DeviceScheduler
from tinsmith.engine.general import choice, recompute
from tinsmith.engine.general.batch import GeneralBatch
from tinsmith.engine.general.model import GeneralModel
from tinsmith.engine.images.requests import placed_pass, placed_prompt
from tinsmith.engine.lora import fused_layers, layers, linear, quantized_linear, targets
from tinsmith.engine.lora.lm_head import LMHead
from tinsmith.engine.lora.saved_spec import read_spec
from tinsmith.engine.model import precision
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.logit_rule import logit_rule
from tinsmith.engine.model.memory import HeapTrimmer, free_bytes
from tinsmith.engine.model_parts import HEAD
from tinsmith.engine.processes.rpc import SAMPLER_METHODS, EngineClient, Method, bound
from tinsmith.engine.sample_validation import check_sample
from tinsmith.engine.sampling.sampler import TorchSampler
from tinsmith.engine.threads.compute import MAX_AT_ONCE
from tinsmith.engine.training import activation_checkpointing
from tinsmith.engine.training.exchange import ALONE, Exchange
from tinsmith.engine.training.trainer import TorchTrainer
from tinsmith.errors import TinsmithError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PreparedBase:
    """A base model with everything that computes on it."""

    base: BaseModel
    active: linear.ActiveAdapters
    head: LMHead
    switch: activation_checkpointing.CheckpointSwitch


def prepare(config: EngineConfig, base: BaseModel) -> PreparedBase:
    """Adapt a loaded base model and replace its layers, as the settings say."""
    precision.set_matmul_precision(base.dtype)
    active = linear.adapt(base)
    choice.check_adapted(base, active)
    is_general = isinstance(base, GeneralModel)
    head = LMHead(base.head, logit_rule(base.model), checks=base.checks)
    if not is_general:
        base = layers.replace_layers(base)
        fused_layers.use_kernels(base)
    if not config.deterministic:  # where nothing may depend on the memory that happens to be free
        autotune.reorder_weights(base, free_bytes())
    if isinstance(base, GeneralModel):
        switch = recompute.install(base, required=config.recompute == "always")
    else:
        switch = activation_checkpointing.install(base)
    return PreparedBase(base, active, head, switch)


class TorchEngine(EngineClient):
    """Implements `engine.interface.Engine`. Sets torch's thread count and matmul precision for the whole process."""

    def __init__(
        self,
        config: EngineConfig,
        base: BaseModel | None = None,
        exchange: Exchange = ALONE,
        prepared: PreparedBase | None = None,
    ) -> None:
        """`base` replaces the model that `config.source` names, and `prepared` one that is adapted already; `exchange`
        connects the ranks of a group."""
        if config.threads:
            torch.set_num_threads(config.threads)
        self._heap = HeapTrimmer()
        if base is None and prepared is None:
            autotune.check_memory(config)
        prepared = prepared or prepare(config, base or choice.load(config))
        base, active, head, switch = prepared.base, prepared.active, prepared.head, prepared.switch
        policy = POLICIES[config.sharing]
        scheduler = DeviceScheduler(policy)
        if config.deterministic:
            precision.use_deterministic_kernels(base.device)
        base = autotune.compile_attention(base)
        with switch.set(config.recompute == "always"):
            memory = autotune.memory_plan(config, base, active)
            tokens = memory.pass_tokens if memory is not None else _pass_tokens(config, base, active, exchange)
            tokens = exchange.least(tokens)
        training_tokens = max(1, round(policy.micro_batch_share * tokens))
        self.trainer = TorchTrainer(
            base,
            head,
            active,
            scheduler,
            training_tokens,
            switch,
            config.recompute,
            packs_requests=not config.deterministic,
            at_once=_at_once(config, base, exchange),
            exchange=exchange,
        )
        batch = GeneralBatch(base, head) if isinstance(base, GeneralModel) else None
        cache_tokens = autotune.resolve_cache_tokens(config, memory, _token_bytes(base))
        self.sampler = TorchSampler(base, head, active, scheduler, tokens, cache_tokens, config.deterministic, batch)
        self._base, self._active, self._exchange = base, active, exchange
        self._scheduler = scheduler
        modules = base.model.modules()
        self._matrices = [module.frozen for module in modules if isinstance(module, linear.LoraLinear)]
        quantized_linear.keep_decoded(self._matrices, autotune.decoded_bytes(base, memory))
        base.checks.keep()
        self._heap.trim()  # reordered weights have freed the original ones
        self._card = replace(
            base.card,
            pass_tokens=training_tokens,
            parameters_per_rank={part: _parameters(base, part) for part in ("attn", "mlp", "unembed")},
            separate_mlp_per_rank=_parameters(base, "mlp", separate_experts=True),
            adapted_modules={**targets.module_names(linear.adapted_targets(base.model)), "unembed": (HEAD,)},
            state_tokens=0 if isinstance(base, GeneralModel) else self.sampler.batch.state_tokens,
            memory=memory,
            vllm_context=autotune.vllm_context(config, base.card, memory),
            cache_tokens=cache_tokens,
            free_bytes=torch.cuda.mem_get_info()[0] if base.device.type == "cuda" else free_bytes(),
        )

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def progress(self) -> int:
        return self._scheduler.turns + sum(matrix.products for matrix in self._matrices)

    @override
    async def call(self, method: Method[P, R], *args: P.args, **options: P.kwargs) -> R:
        target = self.sampler if method.__name__ in SAMPLER_METHODS else self.trainer
        return await bound(target, method)(*args, **options)

    @override
    async def create(self, model_id: str, lora: LoraSpec) -> None:
        choice.check_spec(self._base, lora)
        await self.trainer.create(model_id, lora)

    @override
    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        placed = [self._placed(request) for request in passes]
        results = iter(await self.trainer.run([request for request in placed if isinstance(request, Pass)]))
        self._heap.after_work()
        return [next(results) if isinstance(request, Pass) else request for request in placed]

    @override
    async def load(self, model_id: str, source: SavedAdapter, *, optimizer: bool) -> None:
        choice.check_spec(self._base, await self._exchange.read(lambda: read_spec(folder_of(source))))
        await self.trainer.load(model_id, source, optimizer=optimizer)

    @override
    async def capture(self, model_id: str, version: str) -> None:
        self.sampler.versions.capture(version, self.trainer.capture(model_id))

    @override
    async def persist(self, version: str, to: Path) -> int:
        return await self.sampler.versions.persist(version, to)

    @override
    async def attach(self, version: str, source: SavedAdapter) -> None:
        folder = folder_of(source)
        choice.check_spec(self._base, read_spec(folder))
        self.sampler.versions.attach(version, folder)

    @override
    async def detach(self, version: str) -> None:
        self.sampler.versions.detach(version)

    @override
    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        if request.images:
            request = placed_prompt(request, self._base.vision, self._card)
            check_sample(request, self._card)  # again, for its length may not have been known
        try:
            return await self.sampler.sample(request, on_delta)
        finally:
            self._heap.trim_when_idle()

    @override
    async def release_memory(self) -> None:
        self.sampler.batch.release_memory()
        self._active.release_memory()
        if self._base.vision is not None:
            self._base.vision.shrink(0)
        self._heap.trim()
        if self._base.device.type == "cuda":
            torch.cuda.empty_cache()

    async def close(self) -> None:
        """Memory is freed with the object."""

    def _placed(self, request: Pass) -> Pass | TinsmithError:
        try:
            return placed_pass(request, self._base.vision, self._card)
        except TinsmithError as error:
            return error


def _at_once(config: EngineConfig, base: BaseModel, exchange: Exchange) -> int:
    """Micro-batches that are computed at the same time."""
    divides = base.computes_in_threads and not config.deterministic and not exchange.lockstep
    return min(MAX_AT_ONCE, torch.get_num_threads()) if divides else 1


def _pass_tokens(config: EngineConfig, base: BaseModel, active: linear.ActiveAdapters, exchange: Exchange) -> int:
    """Tokens of a micro-batch where no plan says them."""
    wanted = config.pass_tokens
    if wanted == "auto" and config.deterministic:
        wanted = model_facts.DETERMINISTIC_TOKENS
    elif wanted == "auto" and exchange.lockstep:
        wanted = autotune.MAX_TOKENS[base.device.type]
    return autotune.resolve_pass_tokens(wanted, base, active, _at_once(config, base, exchange))


def _token_bytes(base: BaseModel) -> int:
    """Of the keys and values of a token; 0 on the general path, where transformers caches them."""
    if isinstance(base, GeneralModel):
        return 0
    return model_facts.token_bytes(base.model.config.get_text_config(), base.dtype)


def _parameters(base: BaseModel, part: str, *, separate_experts: bool = False) -> int:
    """Parameters of an adapter of rank 1 on one part of the model."""
    trained = {f"train_{name}": name == part for name in ("attn", "mlp", "unembed")}
    return linear.layout_for(base, LoraSpec(rank=1, seed=0, separate_experts=separate_experts, **trained)).size
