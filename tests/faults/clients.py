"""Tenants: unmodified SDK clients that train, save, load and sample in a seeded order, and compare every answer.

Each tenant repeats rounds. A round is a session of its own: one model, some operations, and the end of the session.
Every answer is compared at once with that of a Reference to the same requests.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types
from tinker._exceptions import RequestFailedError

from tests.faults.closes import CHECK_S, stacks, wait_until_closed
from tests.faults.reference import LEARNING_RATE, PROMPT, SAMPLE_SEED, SAMPLE_TOKENS, Reference, Version

STUCK_S = 900.0
"""Longest time that a request may take. The SDK waits up to 30 s between two attempts, and under constant faults many
of them fail; what is stuck is stuck when the faults have ended, too (`run.END_S`)."""
LOST_CANCELLATION = "close, with a cancellation that Python 3.11 lost"
MAX_SAMPLERS = 12
LONG_ROW, LONG_ROWS = 900, 0.05
"""Tokens of a long row, and how often there is one."""
DISK_ERRORS = ("data folder", "disk", "not on disk yet", "OSError", "File too large", "Os {")
"""Parts of the messages of saves that a full disk refused."""
PROMPT_INPUT = types.ModelInput.from_ints(list(PROMPT))


class ViolationError(AssertionError):
    """A law of the service does not hold."""


@dataclass
class _Round:
    """One session: its model at the service, and here."""

    service: tinker.ServiceClient
    training: tinker.TrainingClient
    model: str
    samplers: list[tuple[tinker.SamplingClient, Version]] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    """Paths of its checkpoints with optimizer state."""


class Tenant:
    """One tenant in a thread of its own."""

    def __init__(
        self, name: str, url: str, key: str, seed: int, reference: Reference, *, sampling_tolerance: float = 0.0
    ) -> None:
        self.name, self.key = name, key
        self._url = url
        self._random = random.Random(f"{seed} {name}")
        self._reference = reference
        self._sampling_tolerance = sampling_tolerance
        self._ending = threading.Event()
        self._saves = 0
        self.done: Counter[str] = Counter()
        """Finished operations by kind."""
        self.rounds = 0
        self.violation: str | None = None
        self.stacks: list[str] = []
        """Where threads and tasks of the clients were when an operation had taken too long."""
        self.now = ""
        """The operation that is under way."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def checkpoints(self) -> dict[str, Any]:
        """Folders that this tenant's checkpoints must equal, by tinker:// path."""
        return self._reference.checkpoints

    def start(self) -> None:
        """Begin the first round."""
        self._thread.start()

    def end(self) -> None:
        """Finish the running round and begin no other."""
        self._ending.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the last round; a tenant that does not end in time is a violation."""
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self.violation is None:
            self.stacks = stacks()
            self.violation = f"{self.name} is stuck in {self.now}"

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._round()
                self.rounds += 1
        except FutureTimeoutError:
            self.stacks = stacks()
            self.violation = f"{self.name}: a future of {self.now} was not resolved within {STUCK_S:.0f} s"
        except Exception as error:  # noqa: BLE001 - whatever a client raises is a violation
            self.violation = f"{self.name} in {self.now}: {type(error).__name__}: {error}"

    # One round.

    def _round(self) -> None:
        self.now = "open"
        current = self._open()
        operations: dict[str, tuple[Callable[[_Round], None], int]] = {
            "train": (self._train, 8),
            "pipeline": (self._pipeline, 3),
            "forward": (self._forward, 2),
            "save": (self._save, 2),
            "save_sampler": (self._save_sampler, 1),
            "snapshot": (self._snapshot, 3),
            "sample": (self._sample, 6),
            "load": (self._load, 1),
        }
        names, weights = list(operations), [weight for _, weight in operations.values()]
        for name in self._random.choices(names, weights, k=self._random.randint(8, 24)):
            if self._ending.is_set():
                break
            self.now = name
            operations[name][0](current)
            self.done[name] += 1
        for name in ("snapshot", "save", "sample"):
            self.now = name
            operations[name][0](current)
        self.now = "close"
        self._reference.drop(current.model)
        self._close(current.service)

    def _open(self) -> _Round:
        service = tinker.ServiceClient(base_url=self._url, api_key=self.key)
        paths = [path for path in self._reference.checkpoints if "/weights/" in path]
        if paths and self._random.random() < 0.4:
            path = self._random.choice(paths[-20:])
            training = self._unless_disk_full(lambda: service.create_training_client_from_state_with_optimizer(path))
            if training is not None:
                return _Round(service, training, self._reference.create_from(path))
        rank, seed = self._random.choice([2, 4, 8]), self._random.randrange(1000)
        training = service.create_lora_training_client("toy", rank=rank, seed=seed).result(timeout=STUCK_S)
        return _Round(service, training, self._reference.create(rank, seed))

    def _close(self, service: tinker.ServiceClient) -> None:
        """End the session. Cancellations that Python has lost are counted: the service has no part in them."""
        holder = service.holder
        closed = service.close("success").future()
        is_ended = partial(has_ended, self._url, self.key, holder.get_session_id())
        if wait_until_closed(closed, holder, is_ended, STUCK_S, CHECK_S):
            self.done[LOST_CANCELLATION] += 1

    # Operations.

    def _train(self, current: _Round, steps: int = 1) -> None:
        """Submit all steps, then compare the answers."""
        batches = [self._draw_rows() for _ in range(steps)]
        adam = types.AdamParams(learning_rate=LEARNING_RATE)
        futures = [
            (current.training.forward_backward(_data(rows), "cross_entropy"), current.training.optim_step(adam))
            for rows in batches
        ]
        for rows, (passed, stepped) in zip(batches, futures, strict=True):
            expected = self._reference.run(current.model, rows)
            self._compare(_logprobs(passed.result(timeout=STUCK_S)), expected, "logprobs of a training pass")
            norm = self._reference.step(current.model)
            self._compare([stepped.result(timeout=STUCK_S).metrics["grad_norm"]], [norm], "norm of a gradient")

    def _pipeline(self, current: _Round) -> None:
        self._train(current, steps=self._random.randint(2, 5))

    def _forward(self, current: _Round) -> None:
        rows = self._draw_rows()
        answer = current.training.forward(_data(rows), "cross_entropy").result(timeout=STUCK_S)
        expected = self._reference.run(current.model, rows, forward_only=True)
        self._compare(_logprobs(answer), expected, "logprobs of a forward pass")

    def _save(self, current: _Round) -> None:
        saved = self._unless_disk_full(lambda: current.training.save_state(self._new_name()))
        if saved is not None:
            self._reference.save(current.model, saved.path, optimizer=True)
            current.saved.append(saved.path)

    def _save_sampler(self, current: _Round) -> None:
        saved = self._unless_disk_full(lambda: current.training.save_weights_for_sampler(self._new_name()))
        if saved is None:
            return
        self._reference.save(current.model, saved.path, optimizer=False)
        sampler = current.training.create_sampling_client(saved.path).result(timeout=STUCK_S)
        self._keep(current, sampler)

    def _snapshot(self, current: _Round) -> None:
        sampler = self._unless_disk_full(current.training.save_weights_and_get_sampling_client)
        if sampler is not None:
            self._keep(current, sampler)

    def _keep(self, current: _Round, sampler: tinker.SamplingClient) -> None:
        current.samplers.append((sampler, self._reference.version(current.model)))
        del current.samplers[:-MAX_SAMPLERS]

    def _sample(self, current: _Round) -> None:
        """Sampling sessions answer for the weights that they were made of, whatever was trained since."""
        if not current.samplers:
            return
        sampler, (logprobs, tokens) = self._random.choice(current.samplers)
        scored = sampler.compute_logprobs(PROMPT_INPUT)
        params = types.SamplingParams(max_tokens=SAMPLE_TOKENS, seed=SAMPLE_SEED)
        sampled = sampler.sample(PROMPT_INPUT, 1, params)
        self._compare(
            scored.result(timeout=STUCK_S)[1:], logprobs, "logprobs of a sampling session", self._sampling_tolerance
        )
        got = tuple(sampled.result(timeout=STUCK_S).sequences[0].tokens)
        if got != tokens:
            raise ViolationError(f"a seeded sample of a sampling session is {got}, not {tokens}")

    def _load(self, current: _Round) -> None:
        if current.saved:
            path = self._random.choice(current.saved)
            if self._unless_disk_full(lambda: current.training.load_state_with_optimizer(path)) is not None:
                self._reference.load(current.model, path)

    # Parts.

    def _unless_disk_full(self, call: Callable[[], Any]) -> Any:
        """The result of a save or a load; None if the service refused it because its disk was full."""
        try:
            return call().result(timeout=STUCK_S)
        except (RequestFailedError, tinker.APIStatusError) as error:
            if not any(part in str(error) for part in DISK_ERRORS):
                raise
            self.done["refused: disk full"] += 1
            return None

    def _new_name(self) -> str:
        self._saves += 1
        return f"{self.name}-{self._saves}"

    def _draw_rows(self) -> list[list[int]]:
        """A few short rows, now and then a long one, whose payload the service stores in another place."""
        lengths = [self._random.randint(4, 12) for _ in range(self._random.randint(1, 2))]
        if self._random.random() < LONG_ROWS:
            lengths += [LONG_ROW] * 4
        return [[self._random.randrange(3, 500) for _ in range(length)] for length in lengths]

    def _compare(self, answer: Any, expected: Any, subject: str, tolerance: float = 0.0) -> None:
        for got, wanted in zip(answer, expected, strict=True):
            if not np.allclose(got, wanted, rtol=0, atol=tolerance):
                far = float(np.abs(np.asarray(got, float) - np.asarray(wanted, float)).max())
                raise ViolationError(f"{subject} are {np.asarray(got)}, not {np.asarray(wanted)} ({far:.2g} away)")


def has_ended(url: str, key: str, session: str) -> bool:
    """Whether the service counts a session as ended; also False if it does not answer."""
    with suppress(httpx.HTTPError):
        answer = httpx.post(
            f"{url}/api/v1/session_heartbeat", json={"session_id": session}, headers={"X-API-Key": key}, timeout=30
        )
        return answer.status_code == httpx.codes.GONE
    return False


def _data(rows: list[list[int]]) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def _logprobs(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    return [item["logprobs"].to_numpy() for item in output.loss_fn_outputs]
