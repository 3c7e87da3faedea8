"""Records of the engine's interface, which the protocols of `interface` exchange.

An engine is one base model shared by many LoRA adapters. It identifies models (adapters in training) and versions
(adapters frozen for sampling) by name only, and knows nothing of tenants, HTTP or databases. The records hold numpy
arrays, so the API process can create and read them without torch.

Dimensions: N positions of a datum or a prompt, K targets per position, L sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from tinsmith.engine.custom_loss.graph import LossGraph
from tinsmith.engine.memory_plan import MemoryPlan
from tinsmith.errors import EngineError
from tinsmith.routed_experts import RouterShape

LORA_ALPHA = 32.0
"""Independent of the rank, as on the hosted service: W' = W + (alpha / rank) B A."""

IMAGE_TOKEN = -1
"""Id at the positions of images in a request; the engine puts the placeholder id of its model there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSupport:
    """How a vision-language model takes images."""

    processor: str
    """Class of transformers' image processor."""
    token_id: int
    """Placeholder of an image's tokens in the model's vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputImage:
    """An image of a datum or a prompt, at the positions start .. start + length of its tokens."""

    data: bytes = field(repr=False)
    """The file as the client sent it; only an engine decodes it."""
    format: Literal["png", "jpeg"]
    start: int
    length: int
    """Number of its tokens as the client expects it; 0 if it does not say: the engine then inserts them at `start`."""
    size: tuple[int, int] | None = None
    """Width and height in pixels to resize it to first."""
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of its tokens, rows x columns = length; set by the engine."""
    digest: bytes = b""
    """SHA-256 of the file and `size`; set by the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Properties of a loaded base model.

    Example: ModelCard(source="/cache/smollm2-135m-instruct", tokenizer="/cache/smollm2-135m-instruct", arch="llama",
    vocab_size=49152, context_length=8192, eos_token_ids=(2,), dtype="bfloat16", device="cpu")
    """

    source: str
    tokenizer: str
    """Argument of `AutoTokenizer.from_pretrained` on this machine: a hub id or an absolute folder."""
    arch: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    pass_tokens: int = 0
    """Packed tokens in a training micro-batch; 0 for an engine that does not pack."""
    parameters_per_rank: Mapping[str, int] = field(default_factory=dict)
    """Parameters of an adapter of rank 1 by part: attn, mlp, unembed."""
    separate_mlp_per_rank: int = 0
    """Those of mlp where each expert has both matrices of its own."""
    adapted_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the modules that adapters reach by part: attn, mlp, unembed."""
    context_limit: str = ""
    """Why the context length is shorter than the model's own maximum; empty if it is not."""
    original_context: int = 0
    """Longer rows than this take other rotary embeddings at all their positions (longrope); 0 if none do."""
    images: ImageSupport | None = None
    """None for a model that takes no images."""
    path: Literal["fast", "general"] = "fast"
    """`fast`: packed trees and kernels of this engine; `general`: transformers' own modules and caches."""
    general_path_fault: str = ""
    """Why a model of an architecture that the fast path supports takes the general path; empty for all others."""
    router: RouterShape | None = None
    """The routers whose choices can be recorded and replayed; None for dense models and on the general path."""
    weight_bytes: int = 0
    """Memory of the weights; 0 if it is not known."""
    free_bytes: int = 0
    """Memory of the device that was free once the model was loaded; 0 if it is not known."""
    memory: MemoryPlan | None = None
    """How the memory of the GPU is divided; None on a CPU."""
    vllm_context: int = 0
    """Longest row that vLLM samples, where it is shorter than the context; else 0."""
    cache_tokens: int = 0
    """Capacity of the sampler's KV cache in tokens; 0 for an engine without one."""
    state_tokens: int = 0
    """Cache tokens that the states of a sequence in recurrent layers are worth; 0 without such layers."""

    @property
    def sampling_tokens(self) -> int:
        """Capacity in tokens of the KV cache that samples are drawn with, which may be another process's; 0 if that is
        not known."""
        return self.cache_tokens if self.memory is None else self.memory.sampling_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """A LoRA adapter as requested by `create_model`. The service draws a seed if the client gives none."""

    rank: int
    seed: int
    alpha: float = LORA_ALPHA
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    separate_experts: bool = False
    """Whether each expert has both matrices of its own, as PEFT's; else those on the hidden states' side are shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW with decoupled weight decay; `grad_clip_norm` 0 means no clipping. Defaults are the SDK's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence to score. Position i of `tokens` predicts `targets[i]`: targets are already shifted.

    Example: Datum(tokens=[5, 6, 7], targets=[6, 7, 2], inputs={"weights": [0.0, 1.0, 1.0]})
    """

    tokens: np.ndarray
    """int32 [N]; IMAGE_TOKEN at the positions of images."""
    targets: np.ndarray
    """int64 [N] or [N, K]; sparse targets are converted to dense ones, with 0 in unlisted cells."""
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Loss inputs: float32 of the targets' shape (masks of loss terms: [N]). Inputs of an uploaded loss may also be
    int64."""
    routed_experts: np.ndarray | None = None
    """int64 [N, W]: the experts of each position of `tokens` (`routed_experts.to_words`), which the pass replays."""
    images: tuple[InputImage, ...] = ()
    """In order of their positions. No loss may depend on the logprob of a target that is an image's token."""


@dataclass(frozen=True, slots=True)
class SavedObject:
    """A saved adapter in an object store, for engines that do not see its folder."""

    digest: str

    def __str__(self) -> str:
        return f"object {self.digest}"


SavedAdapter = Path | SavedObject
"""A saved adapter, as engines read it: its folder or its object."""


def folder_of(source: SavedAdapter) -> Path:
    """The folder of a saved adapter. Raises EngineError for an object: `adapters.cached_engine` fetches those."""
    if isinstance(source, SavedObject):
        raise EngineError(f"This engine has no object store to read {source} from.")
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward_backward (or forward) request for one model. Losses are sums over all its tokens."""

    model_id: str
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    graph: LossGraph | None = None
    """The uploaded loss if loss_fn is `custom`."""
    start: SavedAdapter | None = None
    """The adapter that a pass of loss_fn `shadow` starts from; None for the model's current weights."""
    share: str = ""
    """Passes of different shares take turns on the device, by tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeChange:
    """What a virtual optimizer step does to a probe."""

    delta: float
    """sum w (logprob after - logprob before)."""
    logprobs_post: np.ndarray | None = None
    """float32 [N] after the step; None if only `delta` was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """Result of a Pass.

    `logprobs[i]` is float32 of the shape of `data[i].targets`, at temperature 1. Keys of `metrics` have the form
    name:reduction; `loss:sum` is always present.
    """

    logprobs: tuple[np.ndarray, ...]
    metrics: Mapping[str, float]
    entropies: tuple[np.ndarray, ...] | None = None
    """float32 [N] of each datum: entropy of the softmax at every position; None unless requested."""
    probes: Mapping[int, ProbeChange] = field(default_factory=dict)
    """Of a pass of loss_fn `shadow`: the change of each probe, by the index of its datum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request for `num_samples` continuations of one prompt and for log-probabilities of the prompt itself.

    `stop_tokens` None means the model's own end-of-sequence ids. With empty `stop_tokens` and `stop_strings`, only
    `max_tokens` ends a sequence.
    """

    request_id: str
    prompt: np.ndarray
    """int32 [N], N >= 1; IMAGE_TOKEN at the positions of images."""
    images: tuple[InputImage, ...] = ()
    """In order of their positions."""
    version: str | None = None
    """Adapter version to sample from; None for the base model."""
    num_samples: int = 1
    first_sample: int = 0
    """Number of the first of these samples, where a request comes in parts: a sample depends on the seed and its
    number."""
    max_tokens: int | None = None
    """None: the rest of the context."""
    temperature: float = 1.0
    """0 is greedy with untempered logprobs; otherwise logprobs are those of softmax(logits / temperature)."""
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    """With prompt_logprobs: only the last n are computed, the others are NaN."""
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: np.ndarray | None = None
    """int64 [N - 1, K]: row i lists the ids to score at prompt position i + 1; -1 is an empty cell."""
    prompt_alt_tokens_k: int = 0
    """Number of alternative tokens to sample at each prompt position after the first."""
    routed_experts: bool = False
    """Record the experts of every token that is computed, in a mixture of experts."""
    cache_scope: str = ""
    """Cached prefixes are shared only within a scope, so that timing reveals nothing about requests of other scopes."""


EMPTY_LOGPROB = -99999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The k most likely tokens per position, best first; an empty cell is id 0 with logprob EMPTY_LOGPROB."""

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
    """A sampled sequence, including the stop token or the tokens of the stop string; never empty."""

    tokens: np.ndarray
    """int32 [L]."""
    logprobs: np.ndarray
    """float32 [L]."""
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None
    routed_experts: np.ndarray | None = None
    """The record [L - 1, layers, k] of all tokens but the last, whose experts nothing has computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDelta:
    """New tokens of one sequence of a request since its previous delta."""

    sample: int
    """Index of the sequence in the request."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    topk: TopK | None = None


OnDelta = Callable[[SequenceDelta], None]
"""Callback for the deltas of a request, which add up to its sequences. Called in the caller's event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """Result of a SampleRequest; prompt fields are None unless requested."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None
    """float32 [N]; NaN at position 0 and at the positions of images, as are `target_prompt_logprobs`. Their cells of
    `topk_prompt` and `prompt_alt` are empty."""
    topk_prompt: TopK | None = None
    """One row per prompt position; row 0 consists of empty cells."""
    target_prompt_logprobs: np.ndarray | None = None
    """float32 of the request's shape; NaN in empty cells."""
    prompt_alt: TopK | None = None
    """One row per prompt position after the first: independent samples, with logprobs at the request's temperature."""
    prompt_routed_experts: np.ndarray | None = None
    """The record [N, layers, k] of the prompt."""
    prompt_tokens: int = 0
    """Tokens of a prompt with images, those of the images included; 0 without images."""
    prompt_cache_hit_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
