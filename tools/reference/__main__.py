"""Rewrite the generated blocks of docs/, and print the pages that changed."""

from __future__ import annotations

import sys

from tools.reference import DOCS, pages, regenerated


def main() -> None:
    """Rewrite all pages."""
    for page in pages():
        before = page.read_text()
        after = regenerated(before)
        if after != before:
            page.write_text(after)
            sys.stdout.write(f"{page.relative_to(DOCS.parent)}\n")


if __name__ == "__main__":
    main()
