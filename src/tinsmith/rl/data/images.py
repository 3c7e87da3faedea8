"""Images of rows of data: files, bytes, data URLs and pictures, and their places in the messages of a prompt.

The text may hold a mark `<image>` for each image, as datasets for LLaVA, verl and EasyR1 do; images of a prompt without
marks come before its first user message. Files of other formats than PNG and JPEG are converted to PNG.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from PIL import Image as Pictures

from tinsmith.chat.images import read_data_url
from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.types import Image, Message

MARK = "<image>"
"""Stands for an image in the text of a message."""
_HINT = "Give paths of image files, their bytes, data URLs, or the image column of a dataset."


def read_images(values: Any, place: str) -> list[Image]:
    """The image, or the images of a list, in a field of a row. Raises ConfigError that names `place`."""
    several = isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray)
    return [_image(value, place) for value in (values if several else [values]) if value is not None]


def check_image_files(values: Any, place: str) -> None:
    """Raise ConfigError that names `place` if one of the images in a field of a row is a path without a file, or a URL.
    No file is read."""
    several = isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray)
    for value in values if several else [values]:
        path = value.get("path") if isinstance(value, Mapping) and value.get("bytes") is None else value
        if isinstance(path, str | Path) and not str(path).startswith("data:"):
            _file(path, place)


def place_images(messages: Sequence[Message], images: Sequence[Image], place: str) -> tuple[Message, ...]:
    """The messages with the images at their marks, or where content parts have them already.

    Raises ConfigError if there are marks or parts of another number.
    """
    parts = sum(len(message.images) for message in messages)
    marks = sum(message.content.count(MARK) for message in messages)
    if not images or parts == len(images):
        return tuple(messages)
    if not parts and not marks:
        first = next((at for at, message in enumerate(messages) if message.role == "user"), 0)
        whole = replace(messages[first], images=tuple((0, image) for image in images))
        return (*messages[:first], whole, *messages[first + 1 :])
    if parts or marks != len(images):
        raise ConfigError(
            f"{place} has {counted(len(images), 'image')} and {parts or marks} places for them.",
            f"Write a mark {MARK} or a content part of type image for each.",
        )
    waiting = iter(images)
    return tuple(_at_marks(message, waiting) for message in messages)


def read_parts(parts: Sequence[Any], images: Iterator[Image], place: str) -> tuple[str, tuple[tuple[int, Image], ...]]:
    """Text and placed images of a message's content parts; a part without its image takes the next of `images`."""
    text, placed = "", list[tuple[int, Image]]()
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            text += str(part["text"])
            continue
        if kind not in ("image", "image_url"):
            raise ConfigError(f"{place} has a content part of type {kind}.", "Use parts of type text and image.")
        value = part.get(kind)
        image = next(images, None) if value is None else _image(value, place)
        if image is None:
            raise ConfigError(f"{place} has an image part without an image.", "Set images to the field with them.")
        placed.append((len(text), image))
    return text, tuple(placed)


def _at_marks(message: Message, images: Iterator[Image]) -> Message:
    pieces = message.content.split(MARK)
    ends = accumulate(map(len, pieces[:-1]))
    placed = tuple((end, next(images)) for end in ends)
    return replace(message, content="".join(pieces), images=placed)


def _image(value: Any, place: str) -> Image:
    """An image given as path, data URL, bytes, {bytes, path}, {url}, or as a picture of Pillow."""
    if isinstance(value, Image):
        return value
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
    if isinstance(value, str) and value.startswith("data:"):
        return _of_file(read_data_url(value)[1], place)
    if isinstance(value, str | Path):
        return _of_file(_file(value, place).read_bytes(), place)
    if isinstance(value, bytes | bytearray):
        return _of_file(bytes(value), place)
    if isinstance(value, Pictures.Image):
        return Image.of(_png(value))
    raise ConfigError(f"{place}: an image is a {type(value).__name__}.", _HINT)


def _file(path: str | Path, place: str) -> Path:
    if "://" in str(path):
        raise ConfigError(f"{place}: the image {str(path)[:60]} is a URL, which is not fetched.", _HINT)
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{place}: there is no image file {file}.", "Paths are relative to the working directory.")
    return file


def _of_file(file: bytes, place: str) -> Image:
    try:
        return Image.of(file)
    except ValueError:
        try:
            with Pictures.open(BytesIO(file)) as picture:
                return Image.of(_png(picture))
        except (OSError, Pictures.DecompressionBombError) as error:
            raise ConfigError(f"{place}: an image cannot be read: {error}", _HINT) from error


def _png(picture: Any) -> bytes:
    """The PNG file of a picture of Pillow; where PNG has no such pixels, in RGB."""
    file = BytesIO()
    (picture if picture.mode in ("1", "L", "P", "RGB", "RGBA") else picture.convert("RGB")).save(file, "PNG")
    return file.getvalue()
