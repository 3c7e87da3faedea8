"""How a trainer takes part in a group of ranks: the protocol Exchange, and the trivial one of a trainer by itself.

All ranks of a group hold the same adapters and get the same calls in the same order. For each attempt at some passes a
rank computes its shares of the rows; the ranks then agree on the outcome, and each takes or drops what it computed.
Gradients stay where they were computed until the optimizer's step needs their sum.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tinsmith.engine.base import PassResult
from tinsmith.engine.training.optimizer import TrainableAdapter
from tinsmith.engine.training.run_rows import RunRows
from tinsmith.engine.training.training_run import TrainingRun

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Job:
    """Passes of one model that succeed or fail together: runs of this rank's shares of their rows."""

    runs: Sequence[TrainingRun]

    def error(self) -> Exception | None:
        """The first error of a run."""
        return next((error for run in self.runs if (error := run.error_of_rows()) is not None), None)

    def outcome(self) -> list[PassResult] | Exception:
        """The results of a job whose runs have all rows, or its error."""
        if (error := self.error()) is not None:
            return error
        if len(self.runs) > 1:
            self.runs[0].merge([run.scores() for run in self.runs])
        return self.runs[0].results()

    def accept(self) -> None:
        """Add the gradients to the model."""
        for run in self.runs:
            run.accept()

    def discard(self) -> None:
        """Leave the model as it was."""
        for run in self.runs:
            run.discard()


class Exchange(Protocol):
    """What the ranks of a group do together. Every rank calls each method, in the same order."""

    @property
    def leads(self) -> bool:
        """Whether this rank answers: it also runs what needs no other rank."""
        ...

    @property
    def lockstep(self) -> bool:
        """Whether the ranks compute each micro-batch together, because the base model is sharded over them."""
        ...

    def least(self, value: int) -> int:
        """The smallest value of all ranks."""
        ...

    async def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each of some values over all ranks."""
        ...

    def ending(self) -> AbstractContextManager[None]:
        """Context in which an error ends the process: this rank is then no longer in step with the others."""
        ...

    def shares(self, jobs: Mapping[str, RunRows]) -> Mapping[str, Sequence[RunRows]]:
        """This rank's shares of the rows of each model's job, one for each of its shards."""
        ...

    async def settle(self, jobs: Sequence[Job]) -> list[list[PassResult] | Exception]:
        """Agree on the outcome of computed jobs. Ranks that do not lead get results with gaps."""
        ...

    async def read(self, read: Callable[[], _Read]) -> _Read:
        """What `read` returns or raises on the rank that leads, the only one that calls it."""
        ...

    def summed(self, model: TrainableAdapter) -> AbstractAsyncContextManager[None]:
        """Context in which the model's gradient is the sum over all ranks, for an optimizer step."""
        ...


class Alone:
    """The exchange of a trainer that is its own group: nothing is cut, sent or summed."""

    leads = True
    lockstep = False

    def least(self, value: int) -> int:
        return value

    async def largest(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def ending(self) -> AbstractContextManager[None]:
        return nullcontext()

    def shares(self, jobs: Mapping[str, RunRows]) -> Mapping[str, Sequence[RunRows]]:
        return {model_id: [rows] for model_id, rows in jobs.items()}

    async def settle(self, jobs: Sequence[Job]) -> list[list[PassResult] | Exception]:
        return [job.outcome() for job in jobs]

    async def read(self, read: Callable[[], _Read]) -> _Read:
        return read()

    @asynccontextmanager
    async def summed(self, model: TrainableAdapter) -> AsyncIterator[None]:
        yield


ALONE = Alone()
