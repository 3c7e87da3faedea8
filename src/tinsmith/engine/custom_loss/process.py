"""Uploaded losses in a child process of their own, so that none can end an engine.

LossProcess starts the child when a loss is first evaluated and reuses it. A loss whose evaluation ends the child fails
its request and is refused from then on; the next loss gets a new child. Evaluation blocks, as other losses do.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinsmith import errors
from tinsmith.engine.custom_loss import messages
from tinsmith.engine.custom_loss.graph import MAX_SECONDS, LossGraph
from tinsmith.engine.process_end import ProcessEnd, oom_kills, process_end
from tinsmith.errors import EngineError, TinsmithError, TooLarge, Unsupported
from tinsmith.processes.start import ConnectedChild

log = logging.getLogger(__name__)

CHILD = "tinsmith.engine.custom_loss.child"
GRACE_S = 5.0
"""Time beyond that for a single operation, and for the backward, which are not interrupted."""
START_S = 90.0
"""Time for a child to start."""
ATTEMPTS = 3
"""Attempts at a loss whose child is ended from outside."""
MAX_REFUSED = 1024
"""Number of refused losses that are remembered."""

DatumInputs = tuple[np.ndarray, Mapping[str, np.ndarray]]
"""Logprobs of the targets, float32 of their shape, and loss inputs of a datum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedLoss:
    """An uploaded loss of one datum."""

    loss: float
    grad: np.ndarray
    """float32 of the shape of the logprobs."""
    metrics: Mapping[str, float]


class LossProcess:
    """Evaluates uploaded losses in one child process."""

    def __init__(self, threads: int = 0) -> None:
        """`threads` of torch in the child, which decide its rounding; 0 leaves them as they are."""
        self._settings = {"threads": threads}
        self._child: ConnectedChild | None = None
        self._refused: dict[str, str] = {}
        """Text of a graph -> why it is refused."""

    @property
    def pid(self) -> int | None:
        """Process id of the child, None without one."""
        return self._child.pid if self._child is not None else None

    def evaluate(
        self, graph: LossGraph, data: Sequence[DatumInputs], seconds: float
    ) -> tuple[list[EvaluatedLoss], float]:
        """The loss of each datum, and `seconds`, the time that earlier data of the request took, with that of these.

        Raises UserError for a loss that is wrong, too large or too slow, or that ended its child.
        """
        text = graph.text
        if text in self._refused:
            raise Unsupported(f"Loss {graph.name} is refused: {self._refused[text]}.", _HINT)
        names = [name for name, _ in graph.inputs[1:]]
        arrays = [array for logprobs, inputs in data for array in (logprobs, *(inputs[name] for name in names))]
        header, grads = self._attempt(graph, seconds, arrays)
        if "error" in header:
            name, message, hint = header["error"]
            raise _error(name, message, hint)
        results = zip(header["results"], grads, strict=True)
        losses = [EvaluatedLoss(loss=loss, grad=grad, metrics=metrics) for (loss, metrics), grad in results]
        return losses, header["seconds"]

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()
        self._child = None

    def _attempt(
        self, graph: LossGraph, seconds: float, arrays: Sequence[np.ndarray]
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        for _ in range(ATTEMPTS):
            kills = oom_kills()
            child = self._started()
            connection = child.connection
            try:
                connection.settimeout(max(MAX_SECONDS - seconds, 0.0) + GRACE_S)
                messages.send(connection, {"graph": graph.text, "seconds": seconds}, arrays)
                return messages.receive(connection)
            except TimeoutError as error:
                self.close()
                raise TooLarge(
                    f"Loss {graph.name}: the losses of the request took over {MAX_SECONDS:g} s.", "Send fewer data."
                ) from error
            except ValueError:
                end = ProcessEnd("its answer was invalid", from_outside=False)
            except (EOFError, OSError):
                now = oom_kills()
                end = process_end(child.exit_code(), memory_ran_out=kills is None or now is None or now > kills)
            self.close()
            log.warning("The process of uploaded losses ended in loss %s: %s.", graph.name, end.text)
            if not end.from_outside:
                raise self._refuse(graph, end.text)
        raise EngineError(
            f"The process of loss {graph.name} was ended {ATTEMPTS} times from outside.", "Send it again."
        )

    def _refuse(self, graph: LossGraph, reason: str) -> TinsmithError:
        while len(self._refused) >= MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[graph.text] = f"it ended its process ({reason})"
        return Unsupported(f"Loss {graph.name} ended its process ({reason}); it is refused from now on.", _HINT)

    def _started(self) -> ConnectedChild:
        """The child, which is started if there is none."""
        if self._child is None:
            self._child = ConnectedChild(CHILD, environment={"CUDA_VISIBLE_DEVICES": ""})
            self._child.connection.settimeout(START_S)
            weakref.finalize(self, self._child.close)
            try:
                messages.send(self._child.connection, self._settings)
                messages.receive(self._child.connection)
            except (EOFError, OSError, ValueError) as error:
                self.close()
                raise EngineError("The process of uploaded losses did not start.", "See the log.") from error
        return self._child


@dataclass(slots=True)
class RequestLoss:
    """An uploaded loss for the data of one request, with the time that they have taken together."""

    process: LossProcess
    graph: LossGraph
    seconds: float = field(default=0.0, init=False)

    def run(self, data: Sequence[DatumInputs]) -> list[EvaluatedLoss]:
        """As `LossProcess.evaluate`."""
        losses, self.seconds = self.process.evaluate(self.graph, data, self.seconds)
        return losses


_HINT = "Change the operation that fails, or evaluate the loss in the client with forward_backward_custom."


def _error(name: str, message: str, hint: str) -> TinsmithError:
    """The error that the child names; only errors of users are expected from it."""
    kinds = {kind.__name__: kind for kind in (errors.BadRequest, errors.TooLarge, errors.Unsupported)}
    return kinds.get(name, EngineError)(message, hint)
