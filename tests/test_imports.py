"""Objects by a text that names them."""

import sys
from pathlib import Path

import pytest

from tinsmith.imports import import_file, import_object

PARTS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True)
class Part:
    size: int
    @classmethod
    def small(cls) -> Part:
        return cls(1)
"""


def test_object_of_a_module_or_a_file(tmp_path: Path):
    file = tmp_path / "parts_of_a_user.py"
    file.write_text(PARTS)
    part = import_object(f"{file}:Part.small")()
    assert part.size == 1
    assert import_object(f"{file}:Part") is type(part)  # made once
    assert import_object("pathlib:Path.cwd")() == Path.cwd()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("pathlib", "neither module:name nor file.py:name"),
        (":Path", "neither module:name nor file.py:name"),
        ("pathlib:Path.none", "pathlib has no 'Path.none'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("/no/such.py:f", "there is no Python file /no/such.py"),
    ],
)
def test_missing_object_is_an_import_error(path, sentence):
    with pytest.raises(ImportError, match=sentence):
        import_object(path)


def test_file_with_the_name_of_a_module_is_refused(tmp_path: Path):
    (tmp_path / "json.py").write_text("")
    with pytest.raises(ImportError, match="the name of another module, json"):
        import_file(tmp_path / "json.py")


def test_file_that_fails_is_not_imported(tmp_path: Path):
    file = tmp_path / "part_that_fails.py"
    file.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_file(file)
    assert file.stem not in sys.modules
