"""Which models decode over pages, and what happens where that does not work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tinsmith.engine import triton_support
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.sampling import decode_check
from tinsmith.engine.sampling.kv_cache import cache_shape
from tinsmith.engine.sampling.paged import choice
from tinsmith.engine.sampling.paged.attention import PagedAttention, attend_gathered
from tinsmith.engine.sampling.paged.pages import PagedCache
from tinsmith.engine.torch_engine import TorchEngine
from tinsmith.errors import Unsupported


def attend_wrongly(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, rule: AttentionRule
) -> Tensor:
    """Without each row's last token but the first."""
    return attend_gathered(query, keys, values, tables, (lengths - 1).clamp(min=1), rule)


@pytest.fixture(scope="module")
def base(paged: Callable[..., TorchEngine], llama: Path) -> Any:
    return paged(llama)._base


def test_check_of_decoding_takes_pages(base: Any) -> None:
    cache = PagedCache(cache_shape(base), 0)
    decode_check.check(base, partial(PagedAttention.of_rows, cache, attend_gathered), cache)
    assert cache.tokens == 0
    with pytest.raises(Unsupported, match="does not continue rows from the cache exactly"):
        decode_check.check(base, partial(PagedAttention.of_rows, cache, attend_wrongly), cache)


def test_states_and_latents_keep_banks(base: Any) -> None:
    assert choice.fits_pages(base)
    assert not choice.fits_pages(replace(base, latent_width=8))
    assert not choice.fits_pages(replace(base, recurrent=SimpleNamespace()))
    assert choice.page_attention(base) is None  # on a CPU


def test_kernel_that_does_not_work_leaves_banks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("paged attention differs from PyTorch's")

    monkeypatch.setattr(triton_support, "find_spec", lambda _: True)
    monkeypatch.setattr(choice, "check", fail)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, recurrent=None, latent_width=0)
    assert choice.page_attention(on_gpu) is None
    assert "decoding is slower" in caplog.text


def test_check_of_the_kernel_finds_errors() -> None:
    device = torch.device("cpu")
    choice.check(attend_gathered, device, torch.bfloat16)
    with pytest.raises(ValueError, match="differs"):
        choice.check(attend_wrongly, device, torch.float32)
