"""The drawn pictures of the documentation are those of tools/pictures.py, and pages show each of them."""

from __future__ import annotations

import pytest

from tools.pictures import IMAGES, PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_current_and_shown(name: str) -> None:
    assert (IMAGES / f"{name}.svg").read_text() == PICTURES[name].svg(), "stale; run: make docs"
    assert any(f"images/{name}.svg" in page.read_text() for page in IMAGES.parent.rglob("*.md"))
