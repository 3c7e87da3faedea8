"""JSON of responses that hold text of clients and models."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from typing_extensions import override

from tinsmith.chat.strict_json import encode_json


class SafeJSONResponse(JSONResponse):
    """A response with such a body."""

    @override
    def render(self, content: Any) -> bytes:
        return encode_json(content).encode()
