"""docs/not-learning.md lists every finding of a diagnosis."""

from __future__ import annotations

import re

from tests.docs.test_pages import ROOT


def test_every_finding_is_documented():
    page = (ROOT / "docs" / "not-learning.md").read_text()
    source = "".join(file.read_text() for file in (ROOT / "src/tinsmith/rl/diagnosis").glob("*.py"))
    names = set(re.findall(r'name="(\w+)"', source))
    assert len(names) > 25
    assert sorted(name for name in names if f"`{name}`" not in page) == []
