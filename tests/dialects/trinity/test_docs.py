"""docs/guides/trinity.md has the table of today."""

from __future__ import annotations

from tests.dialects.trinity.keys_table import PAGE, written


def test_the_page_has_the_table_of_today():
    page = PAGE.read_text()
    assert page == written(page), "run: python -m tests.dialects.trinity.keys_table"
