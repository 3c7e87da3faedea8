"""Fixtures: float32 engines on tiny vision-language models, and rows of text and images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import Wait
from tinsmith.engine.base import InputImage
from tinsmith.engine.config import EngineConfig

Parts = Sequence[list[int] | bytes]
"""Token ids, and files of images between them."""


@pytest.fixture(scope="session")
def vision_engine(wait: Wait, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """An engine by the type of its model, created once."""
    from tests.vision import save_vision_model
    from tinsmith.engine.build import build

    made: dict[str, Any] = {}

    def engine(model_type: str = "qwen3_vl") -> Any:
        if model_type not in made:
            folder = save_vision_model(Path(tmp_path_factory.mktemp(model_type)), model_type)
            made[model_type] = build(EngineConfig(source=str(folder), dtype="float32", device="cpu", threads=1))
        return made[model_type]

    yield engine
    for each in made.values():
        wait(each.close())


def row_of(parts: Parts, *, expected: bool = True) -> tuple[np.ndarray, tuple[InputImage, ...]]:
    """Tokens and images as the service decodes them; with `expected`, with transformers' numbers of tokens."""
    from tests.vision import image_tokens

    tokens, images = list[int](), list[InputImage]()
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        length = image_tokens(part) if expected else 0
        images.append(InputImage(data=part, format="png", start=len(tokens), length=length))
        tokens += [-1] * length
    return np.array(tokens, np.int32), tuple(images)
