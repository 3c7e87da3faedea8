"""Images of chat completions: data URLs in messages, and their places among the tokens of the rendered prompt."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

import numpy as np

from tinsmith.engine.base import ImageSupport, InputImage
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.service.wire.model_input import image_chunk, join_chunks

_DATA_URL = re.compile(r"data:image/(png|jpeg);base64,")


def place_images(
    ids: Sequence[int], urls: Sequence[str], support: ImageSupport
) -> tuple[list[int], tuple[InputImage, ...]]:
    """The prompt without the placeholders that the chat template has put there, and the images in their places.

    The engine inserts as many placeholders as an image has tokens. Raises BadRequest, TooLarge or Unsupported.
    """
    tokens = np.asarray(ids, np.int32)
    places = np.flatnonzero(tokens == support.token_id)
    if len(places) != len(urls):
        raise BadRequest(
            f"The rendered conversation has {len(places)} placeholders of images for {len(urls)} images.",
            "Remove the placeholder from your text, or serve the model with a chat template that takes images.",
        )
    chunks = list[np.ndarray | InputImage]()
    end = 0
    for place, url in zip(places.tolist(), urls, strict=True):
        chunks += [tokens[end:place], _image(url)]
        end = place + 1
    prompt, images = join_chunks("The conversation", [*chunks, tokens[end:]])
    return prompt.tolist(), images


def _image(url: str) -> InputImage:
    match = _DATA_URL.match(url)
    if match is None:
        raise Unsupported(
            f"image_url '{url[:40]}' is not a data URL of a PNG or JPEG file: the server fetches no files.",
            "Send data:image/png;base64,... or data:image/jpeg;base64,...",
        )
    try:
        data = base64.b64decode(url[match.end() :], validate=True)
    except ValueError as error:
        raise BadRequest(f"An image_url is not base64: {error}.", "Encode the whole file.") from error
    return image_chunk("The conversation", data, match[1], None, None)
