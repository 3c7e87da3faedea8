"""Images of chat completions: data URLs in messages, and their places among the tokens of the rendered prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tinsmith.chat.images import read_data_url
from tinsmith.engine.base import ImageSupport, InputImage
from tinsmith.errors import BadRequest
from tinsmith.plurals import counted
from tinsmith.service.wire.model_input import image_chunk, join_chunks


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
            f"The rendered conversation has {counted(len(places), 'placeholder')} of images for "
            f"{counted(len(urls), 'image')}.",
            "Remove the placeholder from your text, or serve the model with a chat template that takes images.",
        )
    chunks = list[np.ndarray | InputImage]()
    end = 0
    for place, url in zip(places.tolist(), urls, strict=True):
        kind, file = read_data_url(url)
        chunks += [tokens[end:place], image_chunk("The conversation", file, kind, None, None)]
        end = place + 1
    prompt, images = join_chunks("The conversation", [*chunks, tokens[end:]])
    return prompt.tolist(), images
