"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from tinsmith.plurals import counted


@pytest.mark.parametrize(
    ("number", "noun", "expected"),
    [
        (0, "file", "0 files"),
        (1, "file", "1 file"),
        (2, "such file", "2 such files"),
        (1, "sampling process", "1 sampling process"),
        (3, "sampling process", "3 sampling processes"),
        (4, "batch", "4 batches"),
        (5, "reply", "5 replies"),
        (6, "day", "6 days"),
        (1.0, "epoch", "1 epoch"),
        (0.5, "epoch", "0.5 epochs"),
        (12345678, "byte", "12345678 bytes"),
    ],
)
def test_nouns_agree_with_their_numbers(number, noun, expected):
    assert counted(number, noun) == expected
