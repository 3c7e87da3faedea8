"""Data URLs of images in messages of the OpenAI API. No other URL is read: nothing is fetched on a client's behalf."""

from __future__ import annotations

import base64
import re
from typing import Literal, cast

from tinsmith.errors import BadRequest, Unsupported

_DATA_URL = re.compile(r"data:image/(png|jpeg);base64,")


def read_data_url(url: str) -> tuple[Literal["png", "jpeg"], bytes]:
    """Format and file of a data URL. Raises Unsupported for other URLs, BadRequest for one that is not base64."""
    match = _DATA_URL.match(url)
    if match is None:
        raise Unsupported(
            f"image_url '{url[:40]}' is not a data URL of a PNG or JPEG file: the server fetches no files.",
            "Send data:image/png;base64,... or data:image/jpeg;base64,...",
        )
    try:
        file = base64.b64decode(url[match.end() :], validate=True)
    except ValueError as error:
        raise BadRequest(f"An image_url is not base64: {error}.", "Encode the whole file.") from error
    return cast(Literal["png", "jpeg"], match[1]), file
