"""Image files from clients: checked by their headers, decoded to pixels. Runs in engines only.

A file of a few kilobytes may declare billions of pixels, so its size is checked before any pixel is decoded. Only the
PNG and JPEG decoders are reachable.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO

from PIL import Image

from tinsmith.engine.base import InputImage
from tinsmith.errors import BadRequest, TooLarge

MAX_IMAGE_BYTES = 16 * 2**20
"""Largest file."""
MAX_PIXELS = 32 * 2**20
"""Pixels of the largest image, decoded or resized: 96 MiB of RGB. Models see at most about half as many."""
MAX_INPUT_PIXELS = 4 * MAX_PIXELS
"""Pixels of all images of an input: seconds of decoding, in which the engine does nothing else."""


def digest(image: InputImage) -> bytes:
    """SHA-256 of the file and the size that it is resized to: equal for images that look the same to a model."""
    return hashlib.sha256(repr(image.size).encode() + image.data).digest()


def check_pixels(where: str, images: Sequence[InputImage]) -> list[tuple[int, int]]:
    """Width and height in pixels that each image of an input has, or is resized to. Raises BadRequest or TooLarge."""
    sizes = [_sizes(f"{where}: image {number}", image) for number, image in enumerate(images)]
    pixels = sum(max(width * height for width, height in of_image) for of_image in sizes)
    if pixels > MAX_INPUT_PIXELS:
        raise TooLarge(f"{where} has images of {pixels} pixels together.", f"Send at most {MAX_INPUT_PIXELS}.")
    return [of_image[-1] for of_image in sizes]


def image_size(where: str, image: InputImage) -> tuple[int, int]:
    """Width and height in pixels that the image has, or is resized to. Raises BadRequest or TooLarge."""
    return _sizes(where, image)[-1]


def _sizes(where: str, image: InputImage) -> list[tuple[int, int]]:
    """Width and height of the file, and those that it is resized to, if any."""
    if len(image.data) > MAX_IMAGE_BYTES:
        raise TooLarge(
            f"{where} has {len(image.data)} bytes.", f"Send images of at most {MAX_IMAGE_BYTES} bytes: resize them."
        )
    with _opened(where, image) as file:
        sizes = [file.size, *([image.size] if image.size else [])]
    for width, height in sizes:
        if not 0 < width * height <= MAX_PIXELS:
            raise TooLarge(f"{where} has {width} x {height} pixels.", f"Send images of up to {MAX_PIXELS} pixels.")
    return sizes


def decoded(where: str, image: InputImage) -> Image.Image:
    """The image in RGB, at its final size. Raises BadRequest or TooLarge."""
    size = image_size(where, image)
    with _opened(where, image) as file:
        pixels = file.convert("RGB")
    return pixels if pixels.size == size else pixels.resize(size, Image.Resampling.BICUBIC)


@contextmanager
def _opened(where: str, image: InputImage) -> Iterator[Image.Image]:
    """The file with its header read; errors of decoding inside the block become BadRequest."""
    form = image.format.upper()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the library's own limit on pixels, which is higher
            with Image.open(BytesIO(image.data), formats=[form]) as file:
                yield file
    except Image.DecompressionBombError as error:
        raise TooLarge(f"{where} has too many pixels: {error}", f"Send images of up to {MAX_PIXELS} pixels.") from error
    except Exception as error:  # the library raises anything for a broken file
        raise BadRequest(
            f"{where} is not a readable {form} file: {error}.", "Send a whole PNG or JPEG file, named as what it is."
        ) from error
