"""JSON of responses that hold text of clients and models."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse
from typing_extensions import override


def encode_json(value: Any) -> str:
    """Compact JSON that can be encoded: half of a surrogate pair becomes a replacement character."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class SafeJSONResponse(JSONResponse):
    """A response with such a body."""

    @override
    def render(self, content: Any) -> bytes:
        return encode_json(content).encode()
