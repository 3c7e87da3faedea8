"""What an engine is: two protocols, Trainer and Sampler, and the records that pass through them.

An engine is one base model that many LoRA adapters share. It knows models (adapters in training) and versions
(adapters frozen for sampling) by their names alone: no tenant, no HTTP, no database. The records hold numpy arrays,
so the API process can make and read them without torch.

Dimensions: N positions of a datum or a prompt, K targets per position, L sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from tinsmith.engine.custom_loss.graph import LossGraph
from tinsmith.errors import TinsmithError

LORA_ALPHA = 32.0
"""Constant and independent of the rank, as on the hosted service: W' = W + (alpha / rank) B A."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What is known of a loaded base model.

    Example: ModelCard(source="/cache/smollm2-135m-instruct", tokenizer="/cache/smollm2-135m-instruct", arch="llama",
    vocab_size=49152, context_length=8192, eos_token_ids=(2,), dtype="bfloat16", device="cpu")
    """

    source: str
    tokenizer: str
    """What `AutoTokenizer.from_pretrained` takes on this machine: a hub id or an absolute folder."""
    arch: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    pass_tokens: int = 0
    """Packed tokens in a micro-batch of training, as chosen; 0 where nothing is packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """A LoRA adapter as `create_model` asks for it; the service draws a seed where the client gave none."""

    rank: int
    seed: int
    alpha: float = LORA_ALPHA
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW with decoupled decay; `grad_clip_norm` 0 means no clipping. Defaults are the SDK's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence to score. Position i of `tokens` predicts `targets[i]`: the caller has shifted already.

    Example: Datum(tokens=[5, 6, 7], targets=[6, 7, 2], inputs={"weights": [0.0, 1.0, 1.0]})
    """

    tokens: np.ndarray
    """int32 [N]."""
    targets: np.ndarray
    """int64 [N] or [N, K]; sparse targets arrive here dense, unlisted cells 0."""
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float32 of the targets' shape (masks of terms: [N]). An uploaded loss reads what it likes, also int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward_backward (or forward) request of one model. Losses are sums over all its tokens."""

    model_id: str
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    graph: LossGraph | None = None
    """The uploaded loss, if loss_fn is `custom`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """`logprobs[i]` is float32 of `data[i].targets`' shape, untempered, from before any step.

    `metrics` has keys of the form name:reduction; `loss:sum` is always there.
    """

    logprobs: tuple[np.ndarray, ...]
    metrics: Mapping[str, float]
    entropies: tuple[np.ndarray, ...] | None = None
    """float32 [N] of each datum, of the whole softmax at every position; None unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """`num_samples` continuations of one prompt, and what is asked about the prompt itself.

    `stop_tokens` None means the model's own end-of-sequence ids; empty tokens and strings mean that nothing stops it.
    """

    request_id: str
    prompt: np.ndarray
    """int32 [N], N >= 1."""
    version: str | None = None
    """The adapter version to sample from; None is the base model."""
    num_samples: int = 1
    max_tokens: int | None = None
    """None: what is left of the context."""
    temperature: float = 1.0
    """0 is greedy with untempered logprobs; otherwise logprobs are those of softmax(logits / temperature)."""
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    """With prompt_logprobs: all but the last n are NaN."""
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: np.ndarray | None = None
    """int64 [N - 1, K]: row i asks for logprobs of these ids at prompt position i + 1; -1 asks for nothing."""
    prompt_alt_tokens_k: int = 0
    """Tokens to draw at each prompt position after the first, as the model would have gone on there."""
    cache_scope: str = ""
    """Cached prefixes are shared within a space alone: nobody learns what was asked in another."""


EMPTY_LOGPROB = -99999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The k likeliest tokens per position, best first; an empty cell is id 0 with logprob EMPTY_LOGPROB."""

    token_ids: np.ndarray
    """int32 [positions, k]."""
    logprobs: np.ndarray
    """float32 [positions, k]."""

    @classmethod
    def empty(cls, positions: int, k: int) -> TopK:
        """Empty cells, to be filled in place."""
        ids = np.zeros((positions, k), np.int32)
        return cls(token_ids=ids, logprobs=np.full((positions, k), EMPTY_LOGPROB, np.float32))

    @classmethod
    def concatenate(cls, parts: Sequence[TopK]) -> TopK:
        """The positions of all parts, one after the other."""
        return cls(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """Tokens with the stop token (or the tokens that spell the stop string) still on the end; never empty."""

    tokens: np.ndarray
    """int32 [L]."""
    logprobs: np.ndarray
    """float32 [L]."""
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDelta:
    """What one sequence of a request has grown by since it was last told."""

    sample: int
    """Which of the request's sequences."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    topk: TopK | None = None


OnDelta = Callable[[SequenceDelta], None]
"""Hears the pieces of a request as they come; together they are its sequences. Called in the caller's event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """The answer to a SampleRequest; prompt fields are None unless asked for."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None
    """float32 [N]; position 0 is NaN."""
    topk_prompt: TopK | None = None
    """Row per prompt position; row 0 is empty cells."""
    target_prompt_logprobs: np.ndarray | None = None
    """float32 of the request's shape; NaN where it asked for nothing."""
    prompt_alt: TopK | None = None
    """Row per prompt position after the first: independent draws, with their logprobs at the request's temperature."""
    prompt_cache_hit_tokens: int = 0
    """Tokens of the prompt that were not computed again."""


class Trainer(Protocol):
    """Adapters in training on one base model. Calls are made one at a time, in the order that they must take effect.

    Each may raise a TinsmithError; after one the model is as it was before the call.
    """

    async def create(self, model_id: str, lora: LoraSpec) -> None:
        """A fresh adapter: A Kaiming-uniform from the seed, B zero."""
        ...

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        """One packed pass over requests of any models: a result or an error for each, never one for all.

        Gradients add to what each model has accumulated since its last step.
        """
        ...

    async def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """One AdamW step with the accumulated gradient, which is then cleared; returns free-form metrics."""
        ...

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        """Write the adapter (and moments) as a PEFT folder, whole or not at all; returns its bytes."""
        ...

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        """Put a saved adapter into a model, made if it is not there yet; without optimizer its moments start anew."""
        ...

    async def drop(self, model_id: str) -> None:
        """Forget the model; unknown names are fine."""
        ...


class Sampler(Protocol):
    """Continuations from the base model or from immutable adapter versions. Many callers at once."""

    async def capture(self, model_id: str, version: str) -> None:
        """Freeze the model's weights of this moment as a version, in memory."""
        ...

    async def persist(self, version: str, to: Path) -> int:
        """Write a captured version as a PEFT folder; afterwards it may leave memory. Returns its bytes."""
        ...

    async def attach(self, version: str, source: Path) -> None:
        """Make a saved adapter folder known as a version; it is read when first needed."""
        ...

    async def detach(self, version: str) -> None:
        """Forget a version; unknown names are fine."""
        ...

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        """Run to the end of every sequence; `on_delta` is told of their tokens on the way."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Stop a request's work; its `sample` call raises Gone."""
        ...


class Engine(Trainer, Sampler, Protocol):
    """Both, over the same weights."""

    @property
    def card(self) -> ModelCard:
        """What is loaded."""
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...
