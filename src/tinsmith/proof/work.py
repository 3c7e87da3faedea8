"""A small training run through the Tinker SDK whose every number is kept, to be compared to the last bit.

Each step samples from the newest weights, trains on the samples with importance sampling and on fixed rows with
cross_entropy, and takes an optimizer step. Seeds fix everything that is drawn.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from tinker import types

from tinsmith.rl.policy.sdk import end_session

STEPS = 4
ROWS, ROW_TOKENS = 4, 48
PROMPT_TOKENS, MAX_TOKENS, SAMPLES = 24, 16, 4
TOKENS = range(5, 105)
"""Token ids that every vocabulary has."""
LEARNING_RATE = 1e-3

Between = Callable[[int], None]
"""Called with the number of a step when its requests were submitted and no result was read."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server to prove."""

    url: str
    key: str
    model: str

    @contextmanager
    def session(self) -> Iterator[tinker.ServiceClient]:
        """A session for the duration of the block."""
        service = tinker.ServiceClient(base_url=self.url, api_key=self.key)
        try:
            yield service
        finally:
            asyncio.run(end_session(service, "success"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the work returned, in order."""

    tokens: tuple[int, ...]
    """Sampled tokens."""
    sampled_logprobs: tuple[float, ...]
    trained_logprobs: tuple[float, ...]
    """Of the sampled tokens, by the trainer with the weights that sampled them."""
    metrics: tuple[float, ...]
    """Losses and norms of gradients."""
    final_logprobs: tuple[float, ...]
    """Of fixed rows under the final weights: they show whether the weights are equal."""

    def differences(self, other: Record) -> list[str]:
        """Names of the parts that are not equal to the last bit."""
        return [name for name in Record.__slots__ if getattr(self, name) != getattr(other, name)]

    def __len__(self) -> int:
        return sum(len(getattr(self, name)) for name in Record.__slots__)


def run_work(address: Address, between: Between = lambda _: None) -> Record:
    """Do the work in a new session."""
    with address.session() as service:
        return _work(service, address.model, between)


def _work(service: tinker.ServiceClient, model: str, between: Between) -> Record:
    training = service.create_lora_training_client(model, rank=8, seed=11).result()
    parts: dict[str, list[float]] = {name: [] for name in Record.__slots__}
    rows = [_cross_entropy(_tokens(seed, ROW_TOKENS)) for seed in range(ROWS)]
    for step in range(STEPS):
        prompt = _tokens(100 + step, PROMPT_TOKENS)
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=MAX_TOKENS, seed=step, temperature=1.0)
        sampling = sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params)
        supervised = training.forward_backward(rows, "cross_entropy")
        between(step)
        replies = [(list(each.tokens), list(each.logprobs or [])) for each in sampling.result().sequences]
        reinforced = training.forward_backward(
            [_importance_sampling(prompt, tokens, logprobs) for tokens, logprobs in replies], "importance_sampling"
        )
        update = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
        for (tokens, logprobs), output in zip(replies, reinforced.result().loss_fn_outputs, strict=True):
            parts["tokens"] += tokens
            parts["sampled_logprobs"] += logprobs
            parts["trained_logprobs"] += _logprobs(output)[-len(tokens) :]
        for result in (supervised.result(), reinforced.result(), update.result()):
            parts["metrics"] += [value for _, value in sorted((result.metrics or {}).items())]
    for output in training.forward(rows, "cross_entropy").result().loss_fn_outputs:
        parts["final_logprobs"] += _logprobs(output)
    tokens = tuple(int(token) for token in parts.pop("tokens"))
    return Record(tokens=tokens, **{name: tuple(values) for name, values in parts.items()})


class Company:
    """Another client of the same server, busy for the duration of the block, with requests of many sizes."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in (self._train, self._sample)]

    def __enter__(self) -> Company:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, work: Callable[[np.random.Generator, Any], None]) -> None:
        draw = np.random.default_rng(7)
        with self._address.session() as service, suppress(tinker.TinkerError):  # such as a refusal for load
            client = service.create_lora_training_client(self._address.model, rank=4, seed=12).result()
            while not self._stop.is_set():
                work(draw, client)

    def _train(self, draw: np.random.Generator, training: Any) -> None:
        rows = [_cross_entropy(_tokens(int(draw.integers(10**6)), int(draw.integers(3, 90)))) for _ in range(3)]
        training.forward_backward(rows, "cross_entropy").result()

    def _sample(self, draw: np.random.Generator, training: Any) -> None:
        sampler = training.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(_tokens(int(draw.integers(10**6)), int(draw.integers(2, 60))))
        params = types.SamplingParams(max_tokens=int(draw.integers(1, 24)))
        sampler.sample(prompt, int(draw.integers(1, 6)), params).result()


def _tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(TOKENS.start, TOKENS.stop, count).tolist()


def _cross_entropy(tokens: list[int]) -> types.Datum:
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
    )


def _importance_sampling(prompt: list[int], reply: list[int], logprobs: list[float]) -> types.Datum:
    """Advantage 1 for the first token of the reply, -1 for the second, and so on."""
    tokens, before = [*prompt, *reply], len(prompt) - 1
    signs = [1.0 - 2.0 * (place % 2) for place in range(len(reply))]
    inputs = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": np.array([0.0] * before + logprobs, np.float32),
        "advantages": np.array([0.0] * before + signs, np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
    )


def _logprobs(output: Any) -> list[float]:
    return [float(value) for value in output["logprobs"].data]
