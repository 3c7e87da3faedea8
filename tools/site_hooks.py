"""Hooks of mkdocs: links from a page to files of the repository outside docs/ become plain names in the site.

In plain Markdown such links work; the site has no such pages. A link to a file that does not exist stops the build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links out of docs/ by the text of the link and the path in the repository."""
    folder = Path("docs", page.file.src_uri).parent

    def plain(match: re.Match[str]) -> str:
        path = os.path.normpath(folder / match[2])
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri} links to {path}, which does not exist.")
        return f"{match[1]} (`{path}`)"

    return _LINK.sub(plain, markdown)
