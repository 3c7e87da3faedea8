"""What the test of the gated delta rule runs in the process of the stand-in device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tests.engine.device import programs, stand_in
from tests.engine.model.hybrid.plain_rule import PlainRule
from tinsmith.engine.model.hybrid.chunk_rule import HeadShape
from tinsmith.engine.model.hybrid.chunk_tensors import ChunkTensors
from tinsmith.engine.model.hybrid.chunk_tree import chunk_tree
from tinsmith.engine.model.hybrid.rule import choice
from tinsmith.engine.model.hybrid.rule.fused import RuleInputs, fused_rule

SHAPE = HeadShape(1, 8, 2, 8)


class DeviceRule:
    """Plain kernels, each of which is one launch."""

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(PlainRule(), name)

        def run(inputs: RuleInputs, *arguments: Any) -> Any:
            parts = [getattr(inputs, field.name) for field in fields(inputs)]
            return stand_in.launch(
                f"rule::{name}", lambda parts, *rest: kernel(RuleInputs(*parts), *rest), parts, *arguments
            )

        return run


@contextmanager
def kernels() -> Iterator[None]:
    """Engines on the device have kernels."""
    with patch.object(choice, "kernels_on", lambda device: DeviceRule() if device.type == stand_in.NAME else None):
        yield


def differences(source: Path) -> tuple[dict[str, float], set[str]]:
    """Largest differences between an engine with kernels and one on the CPU, and the kernels that ran."""
    with kernels(), stand_in.counting() as counts:
        numbers = programs.differences(source, programs.train_and_sample)
    return numbers, {name for name in counts.launches if name.startswith("rule::")}


def launches(length: int) -> int:
    """Of a layer's rule, forward and backward, for a row of this length whose last state is wanted."""
    device = stand_in.install()
    tree = ChunkTensors.of(chunk_tree(np.arange(length) - 1, 1, ends=[length - 1]), device)
    slots = torch.randn(len(tree.inputs) // tree.size, tree.size, 2 * SHAPE.keys + 16, device=device)
    gates = [torch.rand(length, 2, device=device) for _ in range(2)]
    leaves: list[Tensor] = [part.requires_grad_() for part in (slots, -gates[0], gates[1])]
    with stand_in.counting() as counts:
        outputs = partial(fused_rule, DeviceRule())(*leaves, SHAPE, tree, None)
        torch.autograd.backward(outputs, [output.detach() for output in outputs])
    return counts.launches.total()
