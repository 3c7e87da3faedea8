"""The fake engine's bigram language model, its adapter folders and its sampling, in numpy.

The hidden state of a position is a fixed random vector of its token, the logits are a fixed random matrix times that
vector, and a LoRA adapter adds to the matrix. Token id 2 ends a sequence. Adapter folders have PEFT's file names.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tinsmith.atomic import atomic_folder, folder_size
from tinsmith.engine.base import (
    LoraSpec,
    ModelCard,
    OnDelta,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SequenceDelta,
    TopK,
)
from tinsmith.engine.fake.files import TOY_VOCABULARY, find_files
from tinsmith.errors import EngineError, Gone

_PREFIX = "base_model.model.lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeAdapter:
    """An adapter on the output matrix: logits += scale * B A h."""

    lora: LoraSpec
    a: np.ndarray
    """float32 [rank, hidden]."""
    b: np.ndarray
    """float32 [vocabulary, rank]."""

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.lora.alpha / self.lora.rank


def write_adapter(to: Path, weights: FakeAdapter, moments: list[np.ndarray] | None) -> int:
    """Write an adapter folder atomically; returns its bytes."""
    config = {
        "peft_type": "LORA",
        "r": weights.lora.rank,
        "lora_alpha": weights.lora.alpha,
        "spec": asdict(weights.lora),
    }
    tensors = {f"{_PREFIX}.lora_A.weight": weights.a, f"{_PREFIX}.lora_B.weight": weights.b}
    with atomic_folder(to) as folder:
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "adapter_model.safetensors")
        if moments is not None:
            save_file({str(index): value for index, value in enumerate(moments)}, folder / "optimizer.safetensors")
        return folder_size(folder)


def read_adapter(source: Path) -> tuple[FakeAdapter, list[np.ndarray] | None]:
    """The adapter, and its moments if the folder has them. Raises EngineError if the folder cannot be read."""
    try:
        config = json.loads((source / "adapter_config.json").read_text())
        tensors = load_file(source / "adapter_model.safetensors")
    except OSError as error:
        raise EngineError(f"The adapter folder {source} cannot be read: {error}") from error
    weights = FakeAdapter(
        lora=LoraSpec(**config["spec"]),
        a=tensors[f"{_PREFIX}.lora_A.weight"],
        b=tensors[f"{_PREFIX}.lora_B.weight"],
    )
    optimizer_file = source / "optimizer.safetensors"
    if not optimizer_file.is_file():
        return weights, None
    moments = load_file(optimizer_file)
    return weights, [moments[str(index)] for index in range(len(moments))]


HIDDEN = 16
_BLOCK = 1 << 22
"""Logits that are computed at once, at most; and at most ROWS positions."""
ROWS = 256
_REPLY = 8
"""With a vocabulary above the toy's, every _REPLY-th token would end its reply if all tokens were equally likely."""


class BigramModel:
    """The model of a source, with its tokenizer and vocabulary (`files.find_files`)."""

    def __init__(self, source: str) -> None:
        files = find_files(source)
        vocab = files.vocabulary
        self.card = ModelCard(
            source=source,
            tokenizer=files.tokenizer,
            arch="fake",
            vocab_size=vocab,
            context_length=files.context,
            eos_token_ids=files.eos,
            dtype="float32",
            device="cpu",
            parameters_per_rank={"unembed": HIDDEN + vocab},
            adapted_modules={"unembed": ("lm_head",)},
        )
        rng = np.random.default_rng(files.seed)
        self._embed = rng.standard_normal((vocab, HIDDEN), dtype=np.float32)
        self._out = rng.standard_normal((vocab, HIDDEN), dtype=np.float32) * np.float32(0.5)
        self._end_logit = np.float32(np.log(vocab / _REPLY) if vocab > TOY_VOCABULARY else 0.0)
        self.rows = max(1, min(ROWS, _BLOCK // vocab))
        """Positions that are computed at once."""
        tokenizer_file = files.folder / "tokenizer.json" if files.folder else None
        has_tokenizer = tokenizer_file is not None and tokenizer_file.is_file()
        self.decode = _decoder(Tokenizer.from_file(str(tokenizer_file)) if has_tokenizer else None)

    def logprobs(
        self, tokens: np.ndarray, weights: FakeAdapter | None
    ) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Yields (positions, hidden [n, D], log-softmax [n, V]) in blocks of positions."""
        for start in range(0, len(tokens), self.rows):
            rows = slice(start, min(start + self.rows, len(tokens)))
            hidden = self._embed[tokens[rows]]
            logits = hidden @ self._out.T
            logits[:, list(self.card.eos_token_ids)] += self._end_logit
            if weights is not None:
                logits += np.float32(weights.scale) * ((hidden @ weights.a.T) @ weights.b.T)
            logits -= logits.max(axis=1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
            yield rows, hidden, logits


def entropy(logp: np.ndarray) -> np.ndarray:
    """Entropy of each row of a log-softmax [n, V]."""
    return -(np.exp(logp) * logp).sum(axis=1)


def _decoder(tokenizer: Tokenizer | None) -> Callable[[list[int]], str]:
    if tokenizer is None:
        return lambda tokens: "".join(map(chr, tokens))
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling of one request with its adapter, until `is_cancelled`."""

    bigram: BigramModel
    request: SampleRequest
    weights: FakeAdapter | None
    is_cancelled: Callable[[], bool]

    async def sequence(self, index: int, on_delta: OnDelta | None) -> SampledSequence:
        """Sample one sequence, yielding to other callers. Raises Gone once the request is cancelled."""
        request, card = self.request, self.bigram.card
        seed = request.seed if request.seed is not None else zlib.crc32(request.request_id.encode())
        rng = np.random.default_rng([seed & (2**64 - 1), index, zlib.crc32(request.prompt.tobytes())])
        stops = card.eos_token_ids if request.stop_tokens is None else request.stop_tokens
        context_left = card.context_length - len(request.prompt) + 1
        tokens, logprobs, tops = [], [], []
        last, reason = int(request.prompt[-1]), "length"
        while len(tokens) < (request.max_tokens or context_left):
            if len(tokens) % 16 == 0:
                await asyncio.sleep(0)
            if self.is_cancelled():
                raise Gone(f"Request {request.request_id} was cancelled.")
            logp = next(self.bigram.logprobs(np.asarray([last]), self.weights))[2][0]
            if request.temperature > 0:
                logp = log_softmax(logp / np.float32(request.temperature))
            last = sample_token(logp, request, rng)
            tokens.append(last)
            logprobs.append(logp[last])
            tops.append(logp)
            if on_delta is not None:
                best = topk(logp[None], request.topk_sample_logprobs) if request.topk_sample_logprobs else None
                on_delta(SequenceDelta(sample=index, tokens=(last,), logprobs=(float(logp[last]),), topk=best))
                await asyncio.sleep(0)
            text = self.bigram.decode(tokens) if request.stop_strings else ""
            if last in stops or any(stop in text for stop in request.stop_strings):
                reason = "stop"
                break
        top = topk(np.stack(tops), request.topk_sample_logprobs) if request.topk_sample_logprobs else None
        return SampledSequence(
            tokens=np.asarray(tokens, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            stop_reason="stop" if reason == "stop" else "length",
            topk=top,
        )

    def add_prompt_results(self, result: SampleResult) -> SampleResult:
        """The result with the requested values about the prompt."""
        request = self.request
        target_ids, k = request.target_prompt_logprobs, request.topk_prompt_logprobs
        if request.prompt_alt_tokens_k:
            result = replace(result, prompt_alt=self._prompt_alternatives())
        if not (request.prompt_logprobs or k or target_ids is not None):
            return result
        prompt, n = request.prompt, len(request.prompt)
        own = np.full(n, np.nan, dtype=np.float32)
        top = TopK.empty(n, k)
        targets = None if target_ids is None else np.full(target_ids.shape, np.nan, dtype=np.float32)
        for rows, _, logp in self.bigram.logprobs(prompt[:-1], self.weights):
            after = slice(rows.start + 1, rows.stop + 1)
            own[after] = np.take_along_axis(logp, prompt[after, None], axis=1)[:, 0]
            best = topk(logp, k)
            top.token_ids[after], top.logprobs[after] = best.token_ids, best.logprobs
            if target_ids is not None and targets is not None:
                target_logp = np.take_along_axis(logp, np.maximum(target_ids[rows], 0), axis=1)
                targets[rows] = np.where(target_ids[rows] >= 0, target_logp, np.nan)
        if request.prompt_logprobs_last_n is not None:
            own[: n - request.prompt_logprobs_last_n] = np.nan
        return replace(
            result,
            prompt_logprobs=own if request.prompt_logprobs else None,
            topk_prompt=top if k else None,
            target_prompt_logprobs=targets,
        )

    def _prompt_alternatives(self) -> TopK:
        """Tokens drawn at each prompt position after the first, with the request's temperature only."""
        request = self.request
        shape = (len(request.prompt) - 1, request.prompt_alt_tokens_k)
        rng = np.random.default_rng([*request.prompt.tolist(), (request.seed or 0) & (2**64 - 1)])
        unrestricted = replace(request, top_k=-1, top_p=1.0)
        alternatives = TopK.empty(*shape)
        for rows, _, block in self.bigram.logprobs(request.prompt[:-1], self.weights):
            for position, logp in enumerate(block, start=rows.start):
                tempered = log_softmax(logp / np.float32(request.temperature)) if request.temperature > 0 else logp
                tokens = [sample_token(tempered, unrestricted, rng) for _ in range(shape[1])]
                alternatives.token_ids[position], alternatives.logprobs[position] = tokens, tempered[tokens]
        return alternatives


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-softmax of one row of logits."""
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


def sample_token(logp: np.ndarray, request: SampleRequest, rng: np.random.Generator) -> int:
    """Sample a token id from tempered logprobs [V]; top_k and top_p restrict the choice, not the logprobs."""
    if request.temperature == 0:
        return int(logp.argmax())
    restricted = request.top_k > 0 or request.top_p < 1  # only then sort: it takes long for a large vocabulary
    order = np.argsort(-logp, kind="stable") if restricted else np.arange(len(logp))
    if request.top_k > 0:
        order = order[: request.top_k]
    weight = np.exp(logp[order].astype(np.float64))
    if request.top_p < 1:
        keep = max(1, int((np.cumsum(weight) - weight < request.top_p * weight.sum()).sum()))
        order, weight = order[:keep], weight[:keep]
    index = np.searchsorted(np.cumsum(weight), rng.random() * weight.sum(), side="right")
    return int(order[min(int(index), len(order) - 1)])


def topk(logp: np.ndarray, k: int) -> TopK:
    """The k likeliest tokens of each row of logprobs [n, V]."""
    ids = np.argsort(-logp, axis=1, kind="stable")[:, :k]
    return TopK(token_ids=ids.astype(np.int32), logprobs=np.take_along_axis(logp, ids, axis=1).astype(np.float32))
