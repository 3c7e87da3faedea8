"""Image files: checked by their headers before anything is decoded, refused by name."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engine.images.conftest import row_of
from tests.vision import END, START, opened, picture
from tinsmith.engine.base import InputImage
from tinsmith.engine.images import files
from tinsmith.errors import BadRequest, TooLarge, Unsupported


def image_of(data: bytes, form: Any = "png", **fields: Any) -> InputImage:
    return InputImage(data=data, format=form, start=0, length=0, **fields)


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that declares side x side pixels."""

    def block(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", pixels) + block(b"IEND", b"")


@pytest.mark.parametrize(
    ("image", "error", "says"),
    [
        (image_of(b"no image at all"), BadRequest, "not a readable PNG"),
        (image_of(picture(0), "jpeg"), BadRequest, "not a readable JPEG"),
        (image_of(picture(0, form="gif")), BadRequest, "not a readable PNG"),
        (image_of(bomb(10_000)), TooLarge, "10000 x 10000 pixels"),
        (image_of(bomb(60_000)), TooLarge, "too many pixels"),
        (image_of(picture(0), size=(2**16, 2**16)), TooLarge, "pixels"),
        (image_of(bytes(files.MAX_IMAGE_BYTES + 1)), TooLarge, "bytes"),
    ],
)
def test_refuses_files_by_their_headers(
    image: InputImage, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    with pytest.raises(error, match=says):
        files.image_size("An image", image)


def test_refuses_files_that_end_early() -> None:
    whole = picture(0, 256, 256)
    assert files.image_size("An image", image_of(whole[:300])) == (256, 256)
    with pytest.raises(BadRequest, match="not a readable PNG"):
        files.decoded("An image", image_of(whole[:300]))


def test_resizes_to_override_dimensions() -> None:
    image = image_of(picture(0, 48, 32), size=(64, 80))
    expected = opened(image.data).resize((64, 80), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(np.asarray(files.decoded("An image", image)), np.asarray(expected))
    assert files.digest(image) != files.digest(replace(image, size=None))


def test_places_compare_expected_tokens(vision_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    vision = vision_engine()._base.vision
    tokens, images = row_of([[5, START], picture(0), [END, 6], picture(1, 64, 64), [7]], expected=False)
    placed, (first, second) = vision.place("x", tokens, images)
    assert (first.start, first.grid, second.start, second.grid) == (2, (2, 3), 10, (4, 4))
    assert placed.tolist() == [5, START, *[511] * 6, END, 6, *[511] * 16, 7]
    again, placed_images = vision.place("x", *row_of([[5, START], picture(0), [END, 6], picture(1, 64, 64), [7]]))
    assert again.tolist() == placed.tolist()
    assert placed_images == (first, second)
    tokens, images = row_of([[5], picture(0)])
    monkeypatch.setattr(files, "MAX_INPUT_PIXELS", 2**27 - 1)
    with pytest.raises(TooLarge, match="images of 134217728 pixels"):
        vision.place("x", tokens, [image_of(bomb(4096), size=(32, 32)) for _ in range(8)])
    with pytest.raises(BadRequest, match="expected_tokens 6; this model sees it as 2 x 4 = 8 tokens"):
        vision.place("x", tokens, (replace(images[0], data=picture(0, 64, 32)),))
    with pytest.raises(BadRequest, match="aspect ratio"):
        vision.place("x", tokens[:1], (image_of(picture(0, 8 * 250, 8)),))


def test_text_models_refuse_images(engine: Any, wait: Callable[..., Any]) -> None:
    from tinsmith.engine.base import SampleRequest

    tokens, images = row_of([[5], picture(0)])
    with pytest.raises(Unsupported, match="takes no images"):
        wait(engine.sample(SampleRequest(request_id="r", prompt=tokens, images=images, max_tokens=1)))
