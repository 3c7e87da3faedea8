"""Whether kernels in Triton can run. Their modules import Triton, so ask here first."""

from __future__ import annotations

from importlib.util import find_spec

import torch


def runs_triton(device: torch.device) -> bool:
    """Whether the device is a CUDA GPU and Triton is installed. A kernel may still fail to compile there."""
    return device.type == "cuda" and find_spec("triton") is not None
