"""Which models decode over pages, and which of these as CUDA graphs. The others keep the banks of `kv_cache`."""

from __future__ import annotations

import logging
from functools import partial

import torch

from tinsmith.engine.lora.experts import grouped
from tinsmith.engine.lora.experts.stack import stack_of
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.support import is_expert_stack
from tinsmith.engine.sampling import decode_check
from tinsmith.engine.sampling.capacity import PAGE_TOKENS
from tinsmith.engine.sampling.kv_cache import cache_shape
from tinsmith.engine.sampling.paged.attention import AttendPages, PagedAttention, attend_gathered
from tinsmith.engine.sampling.paged.pages import PagedCache
from tinsmith.engine.sampling.paged.step import Capture, cuda_capture
from tinsmith.engine.triton_support import runs_triton

log = logging.getLogger(__name__)


def page_attention(base: BaseModel) -> AttendPages | None:
    """The kernel for a base model's decoding over pages; None for a model or a device that keeps banks."""
    if not (runs_triton(base.device) and fits_pages(base)):
        return None
    try:
        from tinsmith.engine.sampling.paged import attention_kernel  # Triton is where GPUs are

        attend_pages: AttendPages = attention_kernel.attend_in_place
        check(attend_pages, base.device, base.dtype)
        cache = PagedCache(cache_shape(base), 0)
        decode_check.check(base, partial(PagedAttention.of_rows, cache, attend_pages), cache)
    except Exception:
        log.warning("The kernel for paged attention does not work here; decoding is slower.", exc_info=True)
        return None
    return attend_pages


def fits_pages(base: BaseModel) -> bool:
    """Whether a model's cache can be in pages: it has keys and values for all its layers, and nothing else. Recurrent
    layers have states, and some models keep latents in place of keys and values."""
    return base.recurrent is None and not base.latent_width


def step_capture(base: BaseModel) -> Capture | None:
    """How a decoding step becomes a graph; None for models whose steps the host must start: where experts are computed
    one by one, it reads which of them have tokens."""
    stacks = [stack_of(module) for module in base.model.modules() if is_expert_stack(module)]
    return cuda_capture() if base.device.type == "cuda" and all(map(grouped.serves, stacks)) else None


def check(candidate: AttendPages, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError unless the candidate gives the results of PyTorch's operators, also beside NaN."""
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(12, 2, PAGE_TOKENS, 64, generator=draw) for _ in range(2))
    query = torch.randn(3, 6, 64, generator=draw)
    tables = torch.tensor([[3, 1, 2, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0], range(1, 11)])
    lengths = torch.tensor([PAGE_TOKENS * 2 + 1, PAGE_TOKENS, PAGE_TOKENS * 10 - 1])
    keys[10, :, -1] = values[10, :, -1] = float("nan")  # after the end of the third row
    query, keys, values = (tensor.to(device, dtype) for tensor in (query, keys, values))
    tables, lengths = tables.int().to(device), lengths.to(device)
    for rule in (AttentionRule(0.125), AttentionRule(0.125, 70, 5.0, torch.ones(6, device=device, dtype=dtype))):
        actual, expected = (
            attend(query, keys, values, tables, lengths, rule).float() for attend in (candidate, attend_gathered)
        )
        if not torch.allclose(actual, expected, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-3):
            raise ValueError("paged attention differs from PyTorch's")
