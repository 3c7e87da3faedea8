"""Rows with images, in numpy: ids that differ between images, and positions for rotary embeddings (M-RoPE).

An image of rows x columns tokens is at one position in time, and spans as many positions in height and width; the text
after it goes on at the largest of these. So positions after an image are smaller than the number of tokens before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinsmith.engine.base import Datum, InputImage


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Tokens of an image among those of a pass."""

    image: InputImage
    at: np.ndarray
    """int64 [M]: positions in the pass, rising."""
    steps: np.ndarray
    """int64 [M]: which of the image's tokens are there."""

    def among(self, computed: np.ndarray) -> ImageTokens:
        """Those at the positions `computed` (int64, rising), renumbered by their place there."""
        places = np.searchsorted(computed, self.at)
        inside = places < len(computed)
        inside[inside] = computed[places[inside]] == self.at[inside]
        return ImageTokens(self.image, places[inside], self.steps[inside])


def content_ids(tokens: np.ndarray, images: Sequence[InputImage]) -> np.ndarray:
    """Ids [N] that two rows share just where their content is the same: an image's are its digest, as negative int64.

    int32 `tokens` themselves for a row without images.
    """
    if not images:
        return tokens
    ids = tokens.astype(np.int64)
    for image in images:
        ids[image.start : image.start + image.length] = -1 - (int.from_bytes(image.digest[:8], "big") >> 2)
    return ids


def rotary_positions(length: int, images: Sequence[InputImage]) -> np.ndarray:
    """int64 [3, N]: the position of each token of a row in time, height and width, as `get_rope_index` gives it."""
    positions, place, start = np.empty((3, length), np.int64), 0, 0
    for image in images:
        positions[:, place : image.start] = start + np.arange(image.start - place)
        start += image.start - place
        rows, columns = image.grid
        place = image.start + image.length
        positions[0, image.start : place] = start
        positions[1, image.start : place] = start + np.repeat(np.arange(rows), columns)
        positions[2, image.start : place] = start + np.tile(np.arange(columns), rows)
        start += max(rows, columns)
    positions[:, place:] = start + np.arange(length - place)
    return positions


def rotary_offset(images: Sequence[InputImage]) -> int:
    """What to add to the number of a token after all images to get its position."""
    return sum(max(image.grid) - image.length for image in images)


def image_mask(length: int, images: Sequence[InputImage]) -> np.ndarray:
    """bool [N]: positions of images."""
    mask = np.zeros(length, bool)
    for image in images:
        mask[image.start : image.start + image.length] = True
    return mask


def predicts_image(datum: Datum) -> np.ndarray:
    """bool [N]: positions whose target is a token of an image, which no loss may depend on."""
    return np.append(image_mask(len(datum.tokens), datum.images)[1:], False)
