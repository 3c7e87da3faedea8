"""The ledger of samples under way outlives its process."""

from __future__ import annotations

from pathlib import Path

from tinsmith.service.ledger import SLACK, Ledger


def test_what_was_open_is_lost_to_the_next_process_and_stays_open(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "samples")
    assert first.lost == ()
    for name in "abc":
        first.open(name)
    first.close(["b", "never opened"])
    second = Ledger(tmp_path / "samples")  # the first one was killed: nothing was shut
    assert second.lost == ("a", "c")
    second.close(["a"])
    assert Ledger(tmp_path / "samples").lost == ("c",)


def test_half_a_line_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("+whole\n+ha")
    assert Ledger(tmp_path / "samples").lost == ("whole",)


def test_the_file_does_not_grow_with_what_is_closed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "samples")
    ledger.open("stays")
    for number in range(SLACK):
        ledger.open(str(number))
        ledger.close([str(number)])
    assert len((tmp_path / "samples").read_text().splitlines()) < SLACK + 10
    assert Ledger(tmp_path / "samples").lost == ("stays",)
