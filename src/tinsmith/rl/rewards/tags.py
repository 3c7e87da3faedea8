"""Text between tags in a reply, such as <answer>…</answer>, read in time linear in the length of the reply."""

from __future__ import annotations

import re


def last_tagged(text: str, tag: str, *, ignore_case: bool = False) -> str | None:
    """Return the text in the last complete <tag>…</tag>, stripped; None if there is none. It may have several lines."""
    flags = re.IGNORECASE if ignore_case else re.NOFLAG
    begin, content = -1, None
    for match in re.finditer(rf"<(/?){re.escape(tag)}>", text, flags):
        if not match[1]:
            begin = match.end()
        elif begin >= 0:
            content, begin = text[begin : match.start()], -1
    return None if content is None else content.strip()
