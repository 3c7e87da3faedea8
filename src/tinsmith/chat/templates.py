"""Chat templates that come with Tinsmith, by name.

`hermes` is ChatML with tools in the format of Hermes and Qwen, for ChatML models whose own template takes no tools.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

NAMES = ("hermes",)
"""Values of `model.chat_template` that name a template."""


@cache
def chat_template(name: str) -> str:
    """The Jinja text of the template `name`, one of NAMES."""
    return files("tinsmith.chat").joinpath(f"{name}.jinja").read_text(encoding="utf-8")
