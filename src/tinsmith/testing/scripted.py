"""Policy for tests without a server: a softmax over a few fixed replies.

The weights are one logit per reply. `step` takes an exact gradient step on them, so rewards rise as in a real run;
`save` writes them to a folder, so runs resume. A token is the code point of a character; 0 ends a reply. Supports the
losses importance_sampling and cross_entropy, and losses computed by the client.

Dimensions: R replies, N positions of a row, K token ids of an auxiliary adapter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from tinsmith.errors import Unsupported
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.chat import ChatCodec, Messages
from tinsmith.rl.policy.models import CheckpointInfo, Models
from tinsmith.rl.policy.sampling import (
    Middleware,
    ModelVersion,
    NextLogprobs,
    PromptLogprobs,
    SampleRequest,
    SampleResult,
    Snapshot,
    TopPromptLogprobs,
    check_prompt_length,
    encoded,
    rendering,
    through,
)
from tinsmith.rl.policy.trainer import AuxiliaryAdapter, Trainer, Update, UpdateResult
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.types import EncodedPrompt, Message, Turn

END = 0
"""Token that ends a reply."""


class CharacterCodec(ChatCodec):
    """Chats as code points: the texts of all messages concatenated, with END after each assistant message."""

    @property
    @override
    def template(self) -> str:
        return "{{ tools }} <tool_call>"

    @property
    @override
    def image_refusal(self) -> Unsupported:
        return Unsupported("The scripted policy takes no images.", "Use a vision-language model.")

    @override
    def with_template_values(self, values: Mapping[str, Any]) -> CharacterCodec:
        return self

    @override
    def encode(self, conversation: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> EncodedPrompt:
        tokens: list[int] = []
        for part in conversation:
            if isinstance(part, Turn):
                tokens = [*part.prompt, *part.tokens]
                continue
            if part.images:
                raise self.image_refusal
            tokens += self.encode_text(part.content)
        return EncodedPrompt(tokens=tuple(tokens))

    @override
    def encode_with_loss_mask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], list[bool]]:
        tokens: list[int] = []
        mask: list[bool] = []
        for index, message in enumerate(messages):
            is_reply = message.role == "assistant"
            message_tokens = [*self.encode_text(message.content), *([END] if is_reply else [])]
            tokens += message_tokens
            mask += [is_reply and index == len(messages) - 1] * len(message_tokens)
        return tokens, mask

    @override
    def encode_text(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    @override
    def save_tokenizer(self, folder: Path) -> None:
        folder.mkdir()  # code points need no files

    @override
    def text(self, tokens: Sequence[int], stop: Sequence[str | int] | None, keep: Sequence[str] = ()) -> str:
        return "".join(chr(token) for token in tokens if token != END)

    @override
    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


class ScriptedSnapshot(Snapshot):
    """One version of the logits over the replies."""

    def __init__(self, replies: Sequence[str], logits: np.ndarray, version: int, *middleware: Middleware) -> None:
        """`logits` is float64 [R]. `middleware` is around each request."""
        texts, logits = tuple(replies), logits.copy()

        async def send(request: SampleRequest) -> SampleResult:
            tokens = encoded(request.prompt, CharacterCodec()).tokens
            match request.logprobs:
                case PromptLogprobs(last=last):
                    return SampleResult(logprobs=_prompt_logprobs(texts, logits, tokens, last))
                case NextLogprobs() as scored:
                    return _next_logprobs(texts, logits, scored)
                case TopPromptLogprobs():
                    raise Unsupported(
                        "A scripted policy has no likeliest tokens of a prompt.", "Test topk_distill with engine=fake."
                    )
                case None:
                    return SampleResult(turns=_turns(texts, logits, tokens, request, version))

        async def open_model(name: str) -> ScriptedSnapshot:
            return ScriptedSnapshot(texts, np.zeros(len(texts)), 0, *middleware)

        sample = through(send, rendering(CharacterCodec()), check_prompt_length, *middleware)
        super().__init__(ModelVersion(version=version, chat=CharacterCodec(), sample=sample, open_model=open_model))


def _turns(
    replies: Sequence[str], logits: np.ndarray, prompt: tuple[int, ...], request: SampleRequest, version: int
) -> tuple[Turn, ...]:
    """Replies sampled from softmax(logits / temperature); the first token carries the logprob of the reply."""
    sampling = request.sampling
    logprobs = _log_softmax(logits / (sampling.temperature or 1.0))
    if not sampling.is_greedy:
        generator = np.random.default_rng(abs(request.seed))
        choices = generator.choice(len(logprobs), size=request.count, p=np.exp(logprobs))
    else:
        choices = np.full(request.count, int(np.argmax(logits)))
    limit = sampling.max_reply(len(prompt))
    return tuple(
        reply_turn(prompt, replies[reply], float(logprobs[reply]), limit, version) for reply in map(int, choices)
    )


def reply_turn(prompt: tuple[int, ...], reply: str, logprob: float, limit: int, version: int) -> Turn:
    """A reply of at most `limit` tokens, whose first token carries its logprob."""
    tokens = (*map(ord, reply), END)[:limit]
    return Turn(
        prompt=prompt,
        tokens=tokens,
        logprobs=(logprob, *[0.0] * (len(tokens) - 1)),
        text="".join(map(chr, tokens)).rstrip(chr(END)),
        stop="stop" if tokens[-1] == END else "length",
        version=version,
    )


def _prompt_logprobs(
    replies: Sequence[str], logits: np.ndarray, tokens: tuple[int, ...], last: int | None
) -> np.ndarray:
    """float32 [N]: the logprob of the reply that ends `tokens`, at its first token; 0 elsewhere."""
    reply_logprobs = _log_softmax(logits)
    logprobs = np.zeros(len(tokens) - 1, np.float32)
    for reply, text in enumerate(replies):
        reply_tokens = (*map(ord, text), END)
        if tokens[-len(reply_tokens) :] == reply_tokens:
            logprobs[len(tokens) - len(reply_tokens) - 1] = reply_logprobs[reply]
    return logprobs if last is None else logprobs[-last:]


def _next_logprobs(replies: Sequence[str], logits: np.ndarray, scored: NextLogprobs) -> SampleResult:
    """The first tokens of the replies, after any prompt; -inf for tokens that begin none."""
    begins: dict[int, float] = {}
    for text, logprob in zip(replies, _log_softmax(logits), strict=True):
        token = ord(text[0]) if text else END
        begins[token] = float(np.logaddexp(begins.get(token, -np.inf), logprob))
    ids = scored.ids or tuple(sorted(begins, key=lambda token: -begins[token])[: scored.top])
    logprobs = np.array([begins.get(token, -np.inf) for token in ids], np.float32)
    return SampleResult(ids=np.array(ids, np.int64), logprobs=logprobs)


class ScriptedPolicy(Trainer, Models):
    """Logits over the replies, in training; its checkpoints are files of a folder."""

    def __init__(
        self,
        replies: Sequence[str],
        folder: Path,
        *,
        state: str = "",
        version: int = 0,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        """`folder` stores checkpoints; `state` is the path of a checkpoint to resume from. `middleware` is around each
        sampling request: a function that waits, or raises, makes a slow or an unreliable server."""
        self._replies, self._folder, self._version = tuple(replies), folder, version
        self._middleware = tuple(middleware)
        self._logits = np.array(json.loads(Path(state).read_text())) if state else np.zeros(len(replies))
        self._gradient = np.zeros_like(self._logits)

    @property
    @override
    def models(self) -> ScriptedPolicy:
        return self

    @property
    @override
    def version(self) -> int:
        return self._version

    @property
    @override
    def chat(self) -> CharacterCodec:
        return CharacterCodec()

    @override
    async def snapshot(self) -> Snapshot:
        return self._sampled(self._logits, self._version)

    @override
    async def accumulate(self, update: Update) -> UpdateResult:
        before = _log_softmax(self._logits)
        logprobs = await self.logprobs(update.rows)
        loss, gradients, metrics = _gradients(update, logprobs)
        for row, gradient_N in zip(update.rows, gradients, strict=True):
            for position, reply in self._replies_of(row):
                self._gradient -= float(gradient_N[position]) * (np.eye(len(before))[reply] - np.exp(before))
        return UpdateResult(logprobs=tuple(logprobs), metrics={"loss:sum": loss, **metrics})

    @override
    async def step(self, optimizer: OptimizerConfig, learning_rate: float) -> Mapping[str, float]:
        metrics = self._descend(learning_rate)
        self._version += 1
        return metrics

    @override
    async def train(
        self, updates: Sequence[Update], optimizer: OptimizerConfig, learning_rate: float
    ) -> list[UpdateResult]:
        results = []
        for update in updates:
            result = await self.accumulate(update)
            results.append(replace(result, metrics={**result.metrics, **self._descend(learning_rate)}))
        self._version += 1
        return results

    def _descend(self, learning_rate: float) -> dict[str, float]:
        """Take one step of plain gradient descent, without moments and clipping."""
        gradient, self._gradient = self._gradient, np.zeros_like(self._logits)
        self._logits = self._logits + learning_rate * gradient
        return {"grad_norm": float(np.linalg.norm(gradient))}

    @override
    async def logprobs(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        before = _log_softmax(self._logits)
        return [self._row_logprobs(row, before) for row in rows]

    @property
    @override
    def extensions(self) -> frozenset[str]:
        return frozenset()

    @override
    async def open_model(self, name: str) -> Snapshot:
        """A snapshot with equal probabilities of all replies, for every name."""
        return self._sampled(np.zeros(len(self._replies)), 0)

    @override
    async def auxiliary_adapter(self, rank: int, seed: int, state: str = "") -> ScriptedAuxiliaryAdapter:
        return ScriptedAuxiliaryAdapter(self._folder, state)

    @override
    async def entropies(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """float32 [N] per row: the entropy over replies, at the first token of the reply; 0 elsewhere."""
        before = _log_softmax(self._logits)
        value = -float((np.exp(before) * before).sum())
        return [
            np.where(np.isin(np.arange(len(row.mask)), [at for at, _ in self._replies_of(row)]), value, 0.0).astype(
                np.float32
            )
            for row in rows
        ]

    @override
    def set_version(self, version: int) -> None:
        self._version = version

    @override
    async def checkpoint_info(self, path: str) -> CheckpointInfo:
        """Nothing is stored besides the logits."""
        return CheckpointInfo()

    @override
    async def save(self, name: str, ttl_seconds: int | None, metadata: Mapping[str, str] | None = None) -> str:
        """Write the logits as JSON and return the path; `ttl_seconds` and `metadata` are ignored."""
        path = self._folder / f"{name}-{self._version}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._logits.tolist()))
        return str(path)

    @override
    async def save_for_sampling(self, name: str, ttl_seconds: int | None = None) -> str:
        return await self.save(f"{name}-sampling", ttl_seconds)

    @override
    async def open_checkpoint(self, path: str, version: int) -> Snapshot:
        return self._sampled(np.array(json.loads(Path(path).read_text())), version)

    @override
    async def delete_checkpoint(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    @override
    async def close(self) -> None:
        pass

    def _sampled(self, logits: np.ndarray, version: int) -> Snapshot:
        return ScriptedSnapshot(self._replies, logits, version, *self._middleware)

    def _row_logprobs(self, row: TrainingRow, logprobs_R: np.ndarray) -> np.ndarray:
        """float32 [N]: the logprob of each reply of the row, at its first token; 0 elsewhere."""
        logprobs = np.zeros(len(row.targets), np.float32)
        for position, reply in self._replies_of(row):
            logprobs[position] = logprobs_R[reply]
        return logprobs

    def _replies_of(self, row: TrainingRow) -> list[tuple[int, int]]:
        """(position of the first token, number of the reply) of each turn: the row's runs of trained tokens."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.mask.astype(np.int8), [0]])))
        return [
            (int(begin), _reply_index(self._replies, row.targets[begin:end])) for begin, end in edges.reshape(-1, 2)
        ]


class ScriptedAuxiliaryAdapter(AuxiliaryAdapter):
    """A table with K logits per prefix, trained by plain gradient descent."""

    @property
    @override
    def vocabulary(self) -> int:
        return 1024

    def __init__(self, folder: Path, state: str = "") -> None:
        self._folder = folder
        self._table: dict[str, list[float]] = json.loads(Path(state).read_text()) if state else {}

    @override
    async def logprobs(self, rows: Sequence[TrainingRow], ids: Sequence[int]) -> list[np.ndarray]:
        """float32 [N, K] per row; all other token ids have probability 0."""
        return [
            np.stack([_log_softmax(self._logits(prefix, len(ids))) for prefix in _prefixes(row)]).astype(np.float32)
            for row in rows
        ]

    @override
    async def fit(
        self,
        rows: Sequence[TrainingRow],
        ids: Sequence[int],
        weights: Sequence[np.ndarray],
        optimizer: OptimizerConfig,
        learning_rate: float,
    ) -> dict[str, float]:
        gradients: dict[str, np.ndarray] = {}
        total = 0.0
        for row, weights_NK in zip(rows, weights, strict=True):
            for prefix, weights_K in zip(_prefixes(row), weights_NK, strict=True):
                logprobs = _log_softmax(self._logits(prefix, len(ids)))
                total -= float((weights_K * logprobs).sum())
                gradient_K = weights_K.sum() * np.exp(logprobs) - weights_K
                gradients[prefix] = gradients.get(prefix, np.zeros(len(ids))) + gradient_K
        for prefix, gradient_K in gradients.items():
            self._table[prefix] = (self._logits(prefix, len(ids)) - learning_rate * gradient_K).tolist()
        return {"loss:sum": total}

    @override
    async def save(self, name: str, ttl_seconds: int | None) -> str:
        path = self._folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._table))
        return str(path)

    def _logits(self, prefix: str, count: int) -> np.ndarray:
        return np.array(self._table.get(prefix) or [0.0] * count)


def _prefixes(row: TrainingRow) -> list[str]:
    return ["".join(chr(token) for token in row.tokens[: index + 1]) for index in range(len(row.tokens))]


def _reply_index(replies: Sequence[str], tokens: Sequence[int] | np.ndarray) -> int:
    text = "".join(chr(token) for token in tokens if token != END)
    return next(index for index, reply in enumerate(replies) if reply.startswith(text))


def _gradients(update: Update, logprobs: Sequence[np.ndarray]) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """(loss, d loss / d logprobs of each row, metrics) of importance_sampling, cross_entropy or a client's loss."""
    if update.client is not None:
        import torch

        leaves = [torch.from_numpy(values.astype(np.float64)).requires_grad_() for values in logprobs]
        loss, metrics = update.client(leaves)
        return float(loss.detach()), [gradient_N.numpy() for gradient_N in torch.autograd.grad(loss, leaves)], metrics
    if update.loss == "cross_entropy":
        gradients = [-inputs["weights"] for inputs in update.inputs]
        return (
            float(sum((gradient_N * p).sum() for gradient_N, p in zip(gradients, logprobs, strict=True))),
            gradients,
            {},
        )
    if update.loss != "importance_sampling":
        raise Unsupported(
            f"The scripted policy has no loss {update.loss}.", "Use importance_sampling or cross_entropy."
        )
    gradients = [
        -np.exp(p - inputs["logprobs"]) * inputs["advantages"]
        for p, inputs in zip(logprobs, update.inputs, strict=True)
    ]
    return float(sum(gradient_N.sum() for gradient_N in gradients)), gradients, {}


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
