"""Rows with images: positions against transformers, and what rows share when packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.images.conftest import Parts, row_of
from tests.vision import END, START, picture, plain_inputs
from tinsmith.engine.images import rows
from tinsmith.engine.model import packing

A, B = picture(0), picture(1, 64, 48)


@pytest.fixture(scope="module")
def packed(vision_engine: Callable[..., Any]) -> Callable[..., packing.PackedTree]:
    def pack(*parts: Parts) -> packing.PackedTree:
        placed = [vision_engine()._base.vision.place("x", *row_of(each)) for each in parts]
        return packing.pack(
            packing.sorted_for_packing(
                packing.PackedRow(key=key, adapter=0, tokens=tokens, images=images)
                for key, (tokens, images) in enumerate(placed)
            )
        )

    return pack


@pytest.mark.parametrize("parts", [[[5, START], A, [END, 6, 7]], [[5], B, [6, 7, 8], A, [9]], [A, [5]], [[5, 6, 7]]])
def test_positions_equal_get_rope_index(parts: Parts, vision_engine: Callable[..., Any]) -> None:
    from tests.vision import vision_model

    model, inputs = vision_model(), plain_inputs(parts)
    tokens, images = vision_engine()._base.vision.place("x", *row_of(parts))
    positions_here = rows.rotary_positions(len(tokens), images)
    if images:
        ids, kinds, grid = (inputs[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw"))
        positions, delta = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)
        np.testing.assert_array_equal(positions_here, positions[:, 0].numpy())
        assert rows.rotary_offset(images) == int(delta)
    else:
        assert positions_here.tolist() == [[0, 1, 2]] * 3


def test_rows_share_equal_images_only(packed: Callable[..., packing.PackedTree]) -> None:
    same = picture(2)  # as large as A
    tree = packed([[5, START], A, [END, 6]], [[5, START], A, [END, 7, 8]], [[5, START], same, [END, 6]], [[5, 9]])
    # 5 and START once; A and END once; 6; 7 8; the other image with END 6; 9.
    assert len(tree.tokens) == 2 + 7 + 1 + 2 + 8 + 1
    assert sorted(len(image.at) for image in tree.images) == [0, 6, 6]
    assert len(packed([[5], A, A, [6]], [[5], A, [6]]).tokens) == 1 + 12 + 1 + 1


def test_text_packs_as_before(packed: Callable[..., packing.PackedTree]) -> None:
    tree = packed([[7, 8, 9]], [[7, 8, 5, 6]])
    assert (tree.tokens.tolist(), tree.index[0].tolist(), tree.rotary) == ([7, 8, 5, 6, 9], [0, 1, 4], None)


def test_tokens_of_an_image_among_those_computed() -> None:
    part = rows.ImageTokens(None, np.arange(4, 9), np.arange(5))  # type: ignore[arg-type]
    some = part.among(np.array([0, 5, 6, 8, 20]))
    assert (some.at.tolist(), some.steps.tolist()) == ([1, 2, 3], [1, 2, 4])
    assert part.among(np.array([0, 1])).at.tolist() == []
    assert torch.as_tensor(part.among(np.arange(30)).at).tolist() == [4, 5, 6, 7, 8]
