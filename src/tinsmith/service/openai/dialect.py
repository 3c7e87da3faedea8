"""Where the OpenAI dialect is spoken: the same routes at the two places where clients look for them, and generate."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter

from tinsmith.service.routes import completions, generate, openai

ROUTERS: Sequence[tuple[str, APIRouter]] = (
    ("/v1", openai.router),
    ("/v1", completions.router),
    ("/oai/api/v1", openai.router),
    ("/oai/api/v1", completions.router),
    ("/inference/v1", generate.router),
)
"""(prefix, routes)."""
