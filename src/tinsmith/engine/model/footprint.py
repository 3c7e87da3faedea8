"""Memory that a base model takes, computed from its config before any weight is read; refuses what does not fit.

Not counted are activations, adapters and the KV cache: their settings take what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tinsmith.engine.cpu.instructions import panel_kind
from tinsmith.engine.images.tower import without_weights
from tinsmith.engine.model import quantization
from tinsmith.engine.model.memory import free_bytes
from tinsmith.engine.model.precision import dtype_name
from tinsmith.errors import ConfigError

NF4_BITS = 4.5
"""Bits of a 4-bit weight, with its block's scale."""

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of a loaded base model."""

    weights: int
    """In the dtype that they are served in."""
    working: int
    """On top, at the peak of loading: a float32 copy of one module while the model is checked and, on a CPU, a copy of
    the head in the dtype that it is multiplied in, which stays, and the copy that this is reordered into."""

    @property
    def peak(self) -> int:
        return self.weights + self.working


def footprint(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, *, four_bit: bool, with_tower: bool = False
) -> Footprint:
    """The footprint of a model of this config; `with_tower` if its vision tower is loaded too."""
    model = without_weights(config, dtype, with_tower=with_tower)
    return footprint_of(model, dtype, device, four_bit=four_bit)


def footprint_of(model: PreTrainedModel, dtype: torch.dtype, device: torch.device, *, four_bit: bool) -> Footprint:
    """The footprint of a model without weights."""
    head = model.get_output_embeddings()
    packed = quantization.four_bit_modules(model) if four_bit else set[str]()
    weights, largest, seen = 0, 0, set[int]()
    for name, module in model.named_modules():
        values = 0
        for parameter in module.parameters(recurse=False):
            values += parameter.numel()
            if id(parameter) not in seen:  # tied weights are one
                seen.add(id(parameter))
                bits = NF4_BITS if name in packed and parameter.ndim == 2 else 8 * parameter.element_size()
                weights += int(parameter.numel() * bits) // 8
        largest = max(largest, 0 if isinstance(module, nn.Embedding) else values)
    head_bytes = 2 if panel_kind(device, dtype) is not None else 4
    head_copies = 2 * head_bytes * head.weight.numel() if head is not None and device.type == "cpu" else 0
    widened = 0 if dtype == torch.float32 else 4 * largest
    return Footprint(weights=weights, working=max(head_copies, widened))


def device_free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()


def check(
    source: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    four_bit: bool,
    free: int,
    with_tower: bool = False,
) -> Footprint:
    """The model's footprint. Raises ConfigError with figures if it is larger than the `free` bytes."""
    needed = footprint(config, dtype, device, four_bit=four_bit, with_tower=with_tower)
    if needed.peak <= free:
        return needed
    name = f"{dtype_name(dtype)}{' with 4-bit projections' if four_bit else ''}"
    place = "this GPU" if device.type == "cuda" else "this machine"
    raise ConfigError(
        f"{source} does not fit: its weights in {name} take {needed.weights / GB:.1f} GB and loading takes "
        f"{needed.working / GB:.1f} GB on top; {place} has {free / GB:.1f} GB free.",
        _advice(config, dtype, device, needed.peak, with_tower=with_tower),
    )


def _advice(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, needed: int, *, with_tower: bool
) -> str:
    """What would take clearly less memory, with figures."""
    narrow = torch.bfloat16
    is_wide = dtype == torch.float32
    sizes = {
        "dtype=bfloat16": footprint(config, narrow, device, four_bit=False, with_tower=with_tower).peak
        if is_wide
        else needed,
        f"{'dtype=bfloat16 and ' if is_wide else ''}quantize=4bit": needed
        if quantization.checkpoint_form(config)
        else footprint(config, narrow, device, four_bit=True).peak,
    }
    ways = [f"{way} ({size / GB:.1f} GB)" for way, size in sizes.items() if size < 0.9 * needed]
    return f"Use {', '.join([*ways, 'a smaller model'])}, or check_memory=false to load it anyway."
