"""The generated blocks of the documentation are those of today's sources."""

from __future__ import annotations

import pytest

from tools.reference import BLOCKS, DOCS, pages, regenerated

PAGES = list(pages())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_generated_blocks_are_current(page):
    text = page.read_text()
    assert regenerated(text) == text, "stale; run: make docs"


def test_every_block_stands_on_exactly_one_page():
    text = "".join(page.read_text() for page in PAGES)
    assert {name: text.count(f"<!-- generated: {name} -->") for name in BLOCKS} == dict.fromkeys(BLOCKS, 1)
    assert {name: text.count(f"<!-- end of {name} -->") for name in BLOCKS} == dict.fromkeys(BLOCKS, 1)


def test_reference_has_each_settings_class_once():
    folder = DOCS / "reference"
    pages_of_classes = [*sorted((folder / "run-file").glob("*.md")), folder / "algorithms.md"]
    text = "".join(page.read_text() for page in pages_of_classes)
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert len(headings) > 80
    assert len(set(headings)) == len(headings)
