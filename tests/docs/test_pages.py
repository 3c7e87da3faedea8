"""Links of the documentation lead somewhere: in plain Markdown and in the site."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]

_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def text_of(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them; repeated headings get a number."""
    anchors: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        anchors.append(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return set(anchors)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_existing_files_and_headings(page):
    for link in _LINK.findall(text_of(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_paths_of_pages_in_sources_and_tests_exist():
    files = [file for room in ("src", "tests", "examples", "benchmarks") for file in (ROOT / room).rglob("*.py")]
    files += [ROOT / "pyproject.toml", ROOT / "Makefile", *(ROOT / "deploy").glob("*")]
    files += [file for kind in ("yaml", "toml", "sh") for file in (ROOT / "examples").rglob(f"*.{kind}")]
    for file in files:
        for path, anchor in re.findall(r"\b(docs/[\w/-]+\.md)\b(?:#([\w-]+))?", file.read_text()):
            assert (ROOT / path).is_file(), f"{file.relative_to(ROOT)} names {path}"
            assert not anchor or anchor in anchors_of(ROOT / path), f"{file.relative_to(ROOT)} names {path}#{anchor}"


def test_site_builds_without_broken_links(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "reference" / "run-file" / "index.html").is_file()
    shutil.rmtree(tmp_path / "site")


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "docs" / "code" / "tour.md",
        ROOT / "docs" / "code" / "extend.md",
        ROOT / "docs" / "reference" / "source-files.md",
        ROOT / "CONTRIBUTING.md",
    ],
    ids=lambda page: page.stem,
)
def test_source_files_named_in_pages_exist(page):
    named = re.findall(
        r"(?<![\w/])((?:chat|cli|dialects|engine|integrations|rl|service)/[\w/]+(?:\.py|/))(?!\w)", page.read_text()
    )
    assert len(named) > 5
    assert [path for path in named if not (ROOT / "src" / "tinsmith" / path).exists()] == []
