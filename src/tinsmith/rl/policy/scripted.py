"""A policy without a model, for tests without a server: it chooses among a few fixed replies.

Logits over replies are the weights; `update` takes an exact policy-gradient step on them, so rewards rise as in a real
run, and `save` writes them to a folder, so runs resume. A token is a character's code point; 0 ends a reply. As a
server it has the losses importance_sampling and cross_entropy, and takes any that the client computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from tinsmith.errors import Unsupported
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.base import Prompt, SamplingConfig, Update, UpdateResult, check_prompt_length
from tinsmith.rl.policy.chat import Conversation
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.types import Message, Turn

END = 0


class LetterCodec:
    """How chats are spelled where a letter is a token: texts one after the other, END after each of the assistant's."""

    template = "{{ tools }} <tool_call>"

    def with_template_values(self, values: Mapping[str, Any]) -> LetterCodec:
        """Nothing reads them."""
        return self

    def prompt(self, conversation: Conversation, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Texts; a Turn is its own tokens and all that came before it."""
        tokens: list[int] = []
        for part in conversation:
            if isinstance(part, Turn):
                tokens = [*part.prompt, *part.tokens]
            else:
                tokens += self.encode_text(part.content)
        return tokens

    def encode_with_loss_mask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, every: bool = False
    ) -> tuple[list[int], list[bool]]:
        """The assistant's texts with their END."""
        tokens: list[int] = []
        mask: list[bool] = []
        for at, message in enumerate(messages):
            spoken = message.role == "assistant"
            new = [*self.encode_text(message.content), *([END] if spoken else [])]
            tokens += new
            mask += [spoken and (every or at == len(messages) - 1)] * len(new)
        return tokens, mask

    def encode_text(self, text: str) -> list[int]:
        """Code points."""
        return [ord(letter) for letter in text]

    def text(self, tokens: Sequence[int], stop: Sequence[str | int] | None, keep: Sequence[str] = ()) -> str:
        """Letters, without END."""
        return "".join(chr(token) for token in tokens if token != END)


class ScriptedSnapshot:
    """Fixed logits over the replies."""

    def __init__(self, replies: Sequence[str], logits: np.ndarray, version: int) -> None:
        """`logits` float64 [R], one for each reply."""
        self._replies, self._version = replies, version
        self._logits = logits.copy()

    @property
    def version(self) -> int:
        """Updates seen."""
        return self._version

    @property
    def chat(self) -> LetterCodec:
        """A letter is a token."""
        return LetterCodec()

    async def sample(self, prompt: Prompt, *, count: int, seed: int, sampling: SamplingConfig) -> tuple[Turn, ...]:
        """Replies drawn from softmax(logits / temperature); the reply's logprob lies on its first token."""
        logprobs = _log_softmax(self._logits / (sampling.temperature or 1.0))
        tokens = _tokens(prompt)
        check_prompt_length(tokens, sampling)
        if sampling.temperature:
            drawn = np.random.default_rng(seed).choice(len(logprobs), size=count, p=np.exp(logprobs))
        else:
            drawn = np.full(count, int(np.argmax(self._logits)))
        return tuple(self._turn(tokens, int(reply), logprobs, sampling) for reply in drawn)

    async def open_model(self, name: str) -> ScriptedSnapshot:
        """Whatever the name, it says each reply as often."""
        return ScriptedSnapshot(self._replies, np.zeros(len(self._replies)), 0)

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """The reply begins where the tokens end with one of the replies; its logprob lies on its first token."""
        logprobs = _log_softmax(self._logits)
        token_logprobs = np.zeros(len(tokens) - 1, np.float32)
        for reply, text in enumerate(self._replies):
            spelled = [*map(ord, text), END]
            if list(tokens[-len(spelled) :]) == spelled:
                token_logprobs[len(tokens) - len(spelled) - 1] = logprobs[reply]
        return token_logprobs

    def _turn(self, prompt: tuple[int, ...], reply: int, logprobs: np.ndarray, sampling: SamplingConfig) -> Turn:
        tokens = (*map(ord, self._replies[reply]), END)[: sampling.max_tokens]
        return Turn(
            prompt=prompt,
            tokens=tokens,
            logprobs=(float(logprobs[reply]), *[0.0] * (len(tokens) - 1)),
            text="".join(map(chr, tokens)).rstrip(chr(END)),
            stop="stop" if tokens[-1] == END else "length",
            version=self._version,
        )


class ScriptedPolicy:
    """Logits in training."""

    def __init__(self, replies: Sequence[str], folder: Path, *, state: str = "", version: int = 0) -> None:
        """`folder` takes checkpoints; `state` is the path of one to go on from."""
        self._replies, self._folder, self._version = tuple(replies), folder, version
        self._logits = np.array(json.loads(Path(state).read_text())) if state else np.zeros(len(replies))

    @property
    def version(self) -> int:
        """Updates made."""
        return self._version

    @property
    def chat(self) -> LetterCodec:
        """A letter is a token."""
        return LetterCodec()

    async def snapshot(self) -> ScriptedSnapshot:
        """A copy of the logits."""
        return ScriptedSnapshot(self._replies, self._logits, self._version)

    async def update(self, update: Update, optimizer: OptimizerConfig, learning_rate: float) -> UpdateResult:
        """One step of plain gradient descent; moments and clipping are left out."""
        before = _log_softmax(self._logits)
        answers = [self._spoken(row, before) for row in update.rows]
        loss, gradients, metrics = _gradients(update, answers)
        gradient = np.zeros_like(self._logits)
        for row, gradient_N in zip(update.rows, gradients, strict=True):
            reply = self._reply(row.targets[row.mask])
            gradient -= float(gradient_N[int(np.argmax(row.mask))]) * (np.eye(len(before))[reply] - np.exp(before))
        self._logits = self._logits + learning_rate * gradient
        self._version += 1
        norm = float(np.linalg.norm(gradient))
        return UpdateResult(logprobs=tuple(answers), metrics={"loss:sum": loss, "grad_norm": norm, **metrics})

    @property
    def extensions(self) -> frozenset[str]:
        """None."""
        return frozenset()

    async def open_model(self, name: str) -> ScriptedSnapshot:
        """Whatever the name, it says each reply as often."""
        return ScriptedSnapshot(self._replies, np.zeros(len(self._replies)), 0)

    async def auxiliary_adapter(self, rank: int, seed: int, state: str = "") -> ScriptedAuxiliaryAdapter:
        """A table in place of an adapter."""
        return ScriptedAuxiliaryAdapter(self._folder, state)

    async def entropies(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """The entropy lies on a reply's first token."""
        before = _log_softmax(self._logits)
        value = -float((np.exp(before) * before).sum())
        return [
            np.where(np.arange(len(row.mask)) == np.argmax(row.mask), value, 0.0).astype(np.float32) for row in rows
        ]

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """The logits as JSON; time to live is left out."""
        path = self._folder / f"{name}-{self._version}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._logits.tolist()))
        return str(path)

    async def save_for_sampling(self, name: str, ttl_seconds: int | None = None) -> str:
        """As `save`."""
        return await self.save(f"{name}-sampling", ttl_seconds)

    async def open_checkpoint(self, path: str, version: int) -> ScriptedSnapshot:
        """The logits that were saved."""
        return ScriptedSnapshot(self._replies, np.array(json.loads(Path(path).read_text())), version)

    async def delete_checkpoint(self, path: str) -> None:
        """Its file goes."""
        Path(path).unlink(missing_ok=True)

    async def close(self) -> None:
        """Nothing to end."""

    def _spoken(self, row: TrainingRow, logprobs_R: np.ndarray) -> np.ndarray:
        """float32 [N]: a row's logprobs."""
        token_logprobs = np.zeros(len(row.targets), np.float32)
        token_logprobs[int(np.argmax(row.mask))] = logprobs_R[self._reply(row.targets[row.mask])]
        return token_logprobs

    def _reply(self, tokens: np.ndarray) -> int:
        return _which(self._replies, tokens)


class ScriptedAuxiliaryAdapter:
    """A table of logits for every text before a position; a plain step of gradient descent changes its rows."""

    vocabulary = 1024

    def __init__(self, folder: Path, state: str = "") -> None:
        self._folder = folder
        self._table: dict[str, list[float]] = json.loads(Path(state).read_text()) if state else {}

    async def logprobs(self, rows: Sequence[TrainingRow], ids: Sequence[int]) -> list[np.ndarray]:
        """Every token but the K has no chance at all."""
        return [
            np.stack([_log_softmax(self._logits(place, len(ids))) for place in _places(row)]).astype(np.float32)
            for row in rows
        ]

    async def fit(
        self,
        rows: Sequence[TrainingRow],
        ids: Sequence[int],
        weights: Sequence[np.ndarray],
        optimizer: OptimizerConfig,
        learning_rate: float,
    ) -> dict[str, float]:
        """Moments and clipping are left out."""
        gradients: dict[str, np.ndarray] = {}
        total = 0.0
        for row, weights_NK in zip(rows, weights, strict=True):
            for place, wanted in zip(_places(row), weights_NK, strict=True):
                logprobs = _log_softmax(self._logits(place, len(ids)))
                total -= float((wanted * logprobs).sum())
                gradient_N = wanted.sum() * np.exp(logprobs) - wanted
                gradients[place] = gradients.get(place, np.zeros(len(ids))) + gradient_N
        for place, gradient_N in gradients.items():
            self._table[place] = (self._logits(place, len(ids)) - learning_rate * gradient_N).tolist()
        return {"loss:sum": total}

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """The table as JSON; time to live is left out."""
        path = self._folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._table))
        return str(path)

    def _logits(self, place: str, count: int) -> np.ndarray:
        return np.array(self._table.get(place) or [0.0] * count)


def _places(row: TrainingRow) -> list[str]:
    return ["".join(chr(token) for token in row.tokens[: at + 1]) for at in range(len(row.tokens))]


def _which(replies: Sequence[str], tokens: Sequence[int] | np.ndarray) -> int:
    text = "".join(chr(token) for token in tokens if token != END)
    return next(index for index, reply in enumerate(replies) if reply.startswith(text))


def _gradients(update: Update, logprobs: Sequence[np.ndarray]) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """(loss, d loss / d logprobs of each row, metrics) of importance_sampling, cross_entropy or a client's loss."""
    if update.client is not None:
        leaves = [torch.from_numpy(row.astype(np.float64)).requires_grad_() for row in logprobs]
        loss, metrics = update.client(leaves)
        return float(loss.detach()), [grad.numpy() for grad in torch.autograd.grad(loss, leaves)], metrics
    if update.loss == "cross_entropy":
        gradients = [-inputs["weights"] for inputs in update.inputs]
        return (
            float(sum((gradient_N * p).sum() for gradient_N, p in zip(gradients, logprobs, strict=True))),
            gradients,
            {},
        )
    if update.loss != "importance_sampling":
        raise Unsupported(f"The scripted policy has no loss {update.loss}.", "Use importance_sampling.")
    gradients = [
        -np.exp(p - inputs["logprobs"]) * inputs["advantages"]
        for p, inputs in zip(logprobs, update.inputs, strict=True)
    ]
    return float(sum(gradient_N.sum() for gradient_N in gradients)), gradients, {}


def _tokens(prompt: Prompt) -> tuple[int, ...]:
    parts = [part for part in prompt if not isinstance(part, int)]
    return tuple(LetterCodec().prompt(parts)) if parts else tuple(int(cast(int, part)) for part in prompt)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
