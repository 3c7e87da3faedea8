"""The process that evaluates uploaded losses, a `ConnectedChild`.

A fault in native code ends this process and no engine. Its memory and processor time are limited. It ends when its
parent closes the socket.
"""

from __future__ import annotations

import math
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinsmith.engine.custom_loss.graph import MAX_SECONDS, Node, read_graph, read_text
from tinsmith.engine.custom_loss.messages import receive, send
from tinsmith.engine.custom_loss.runner import CustomLoss
from tinsmith.errors import TinsmithError
from tinsmith.processes.start import parents_socket

MEMORY = 4 << 30
"""Address space beyond that of the process at its start. A loss may hold 2 ** 25 elements and their gradients."""
CPU_GRACE_S = 5.0
MAX_LOSSES = 64
"""Losses whose plans are remembered."""
_FIRST = read_graph(
    "first",
    [("logprobs", 1)],
    [
        Node(op="placeholder", name="logprobs", target="logprobs"),
        Node(op="call_function", name="exp", target="torch.exp", args=[{"ref": "logprobs"}]),
        Node(op="call_method", name="sum", target="sum", args=[{"ref": "exp"}]),
        Node(op="output", name="output", target="output", args=[{"tuple": [{"ref": "sum"}, {"dict": {}}]}]),
    ],
)


def main() -> None:
    """Entry point of the process."""
    connection = parents_socket()
    settings, _ = receive(connection)
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    losses: dict[str, CustomLoss] = {}
    CustomLoss(_FIRST).run(torch.zeros(1), {})  # imports modules of torch, which takes seconds
    _limit_memory()
    send(connection, {})
    while True:
        try:
            header, arrays = receive(connection)
        except EOFError:
            return
        _limit_time(header["seconds"])
        text = header["graph"]
        loss = losses.pop(text, None) or CustomLoss(read_text(text))
        loss.seconds, losses[text] = header["seconds"], loss
        while len(losses) > MAX_LOSSES:
            del losses[next(iter(losses))]
        send(connection, *_evaluate(loss, arrays))


def _evaluate(custom_loss: CustomLoss, arrays: list[np.ndarray]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The losses and metrics of each datum with the seconds used so far, and the gradients; or the error."""
    names = [name for name, _ in custom_loss.graph.inputs[1:]]
    width = 1 + len(names)
    results, grads = [], []
    try:
        for start in range(0, len(arrays), width):
            logprobs, *inputs = arrays[start : start + width]
            loss, grad, metrics = custom_loss.run(torch.from_numpy(logprobs), dict(zip(names, inputs, strict=True)))
            results.append([loss, metrics])
            grads.append(grad.numpy())
    except TinsmithError as error:
        return {"error": [type(error).__name__, error.message, error.hint]}, []
    return {"results": results, "seconds": custom_loss.seconds}, grads


def _limit_memory() -> None:
    """Limit the address space, and leave no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux: there is no such limit
        return
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time(used_s: float) -> None:
    """Limit the processor time of the next request, for the case that the parent is gone and ends nothing."""
    allowed_s = (max(MAX_SECONDS - used_s, 0.0) + CPU_GRACE_S) * torch.get_num_threads()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + allowed_s), hard))


if __name__ == "__main__":
    main()
