"""An engine on the CPU whose decoding is that of a GPU: pages, and steps from static tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.architectures import save_tiny
from tests.engine.device.programs import engine_on_cpu
from tinsmith.engine.lora import compiled_adapters
from tinsmith.engine.lora.elementwise import choice
from tinsmith.engine.lora.head import choice as head_choice
from tinsmith.engine.model import precision
from tinsmith.engine.sampling import batch, device_sampling, sampler, token_sampling
from tinsmith.engine.sampling.paged.attention import attend_gathered
from tinsmith.engine.torch_engine import TorchEngine


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


@pytest.fixture(scope="session")
def paged() -> Callable[..., TorchEngine]:
    """`paged(folder, capture=None, **settings)`: such an engine."""

    def build(source: Path, capture: Any = None, **settings: Any) -> TorchEngine:
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(sampler, "page_attention", lambda _: attend_gathered)
            patches.setattr(batch, "step_capture", lambda _: capture)
            return engine_on_cpu(source, **settings)

    return build


@pytest.fixture
def operators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whatever is computed is PyTorch's operators: NumPy's sums and Numba's loops are in no record."""
    monkeypatch.setattr(choice, "kernels_on", lambda *_: None)
    monkeypatch.setattr(head_choice, "panel_kind", lambda *_: None)
    monkeypatch.setattr(compiled_adapters, "work_on", lambda *_, **__: False)
    for module in (device_sampling, token_sampling):
        monkeypatch.setattr(module, "cumulative_sum", lambda values, dim=1: precision._by_products(values.double()))
