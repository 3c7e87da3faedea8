"""A model input of text and images as one row of tokens: chunks, limits, and numbers of tokens that clients left out.

Image files are not decoded here: the API process never does. The engine compares the number of tokens with the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tinsmith.engine.base import IMAGE_TOKEN, InputImage
from tinsmith.errors import BadRequest, TooLarge, Unsupported
from tinsmith.plurals import counted

FORMATS = ("png", "jpeg")
MAX_TOKENS = 2**15
"""Tokens of one image; no image processor gives more."""
MAX_IMAGES = 256
"""Images of one input."""

REFUSED_CHUNKS: Mapping[str, str] = {
    "image_asset_pointer": "The server fetches no files: send the image's bytes, as a chunk of type image.",
}
"""Hints for types of chunks that are refused for a reason of their own."""


def unsupported_chunk(where: str, kind: str) -> Unsupported:
    """Error for a chunk of a type that is not supported."""
    return Unsupported(
        f"{where} holds a chunk of type {kind}.",
        REFUSED_CHUNKS.get(kind, "Send chunks of type encoded_text or image only."),
    )


def image_chunk(
    where: str, data: bytes, form: str, expected_tokens: int | None, size: tuple[int, int] | None
) -> InputImage:
    """An image that has no place yet. Raises BadRequest or TooLarge."""
    if form not in FORMATS:
        raise BadRequest(f"{where} holds an image of format '{form}'.", "Send png or jpeg.")
    if not data:
        raise BadRequest(f"{where} holds an image without data.", "Send the bytes of the file.")
    if expected_tokens is not None and not 0 < expected_tokens <= MAX_TOKENS:
        raise BadRequest(f"{where} holds an image with expected_tokens {expected_tokens}.", f"1 to {MAX_TOKENS}.")
    if size is not None and min(size) < 1:
        raise BadRequest(f"{where} holds an image with override_dimensions {size}.", "Give at least 1 x 1 pixels.")
    return InputImage(
        data=data, format="png" if form == "png" else "jpeg", start=0, length=expected_tokens or 0, size=size
    )


def join_chunks(
    where: str, chunks: Sequence[np.ndarray | InputImage], total: int | None = None
) -> tuple[np.ndarray, tuple[InputImage, ...]]:
    """Tokens int32 [N], with IMAGE_TOKEN at the positions of images, and the images in their places.

    With `total`, the number of targets, one image may lack its number of tokens. Raises BadRequest or TooLarge.
    """
    images = [chunk for chunk in chunks if isinstance(chunk, InputImage)]
    if len(images) > MAX_IMAGES:
        raise TooLarge(f"{where} has {counted(len(images), 'image')}.", f"At most {MAX_IMAGES}.")
    length = 0
    if images and total is not None:
        unknown = sum(not image.length for image in images)
        length = total - sum(chunk.length if isinstance(chunk, InputImage) else len(chunk) for chunk in chunks)
        if unknown > 1 or not unknown <= length <= unknown * MAX_TOKENS:
            raise BadRequest(
                f"{where} has {counted(total - length, 'token')} and {counted(unknown, 'image')} without "
                f"expected_tokens; target_tokens has {total}.",
                "Set expected_tokens of each image, and give targets for the tokens of images too.",
            )
    pieces, placed, start = [np.zeros(0, "<i4")], list[InputImage](), 0
    for chunk in chunks:
        if isinstance(chunk, InputImage):
            placed.append(replace(chunk, start=start, length=chunk.length or length))
            pieces.append(np.full(placed[-1].length, IMAGE_TOKEN, "<i4"))
        else:
            pieces.append(chunk)
        start += len(pieces[-1])
    return np.concatenate(pieces), tuple(placed)
