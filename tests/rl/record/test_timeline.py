"""The timeline shows what ran at the same time, and the overlap is the share of the trainer's work."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ElementTree

import pytest

from tests.rl.scripted_run import rows, run, settings
from tinsmith.rl.record import timeline
from tinsmith.rl.record.timeline import OverlapMeter, Span
from tinsmith.rl.rollouts.sampler import BusyTime
from tinsmith.testing import run_virtually


def bars(spans: list[Span], kind: str) -> list[tuple[float, float, float]]:
    """x, y and width of the bars of a kind."""
    root = ElementTree.fromstring(timeline.svg(spans))
    rectangles = [each for each in root.iter("rect") if each.attrib["class"].endswith(kind)]
    return [(float(each.attrib["x"]), float(each.attrib["y"]), float(each.attrib["width"])) for each in rectangles]


def test_batches_that_overlap_are_in_rows_of_their_own():
    spans = [
        Span(1, "sampling", 100.0, 104.0),
        Span(2, "sampling", 100.0, 106.0),
        Span(3, "sampling", 105.0, 110.0),
        Span(1, "training", 104.0, 105.0),
        Span(2, "training", 106.0, 110.0),
    ]
    sampling, training = bars(spans, "sampling"), bars(spans, "training")
    assert [y for _, y, _ in sampling] == [0, 22, 0]  # the third begins after the first has ended
    assert {y for _, y, _ in training} == {44}
    second = (1140 - 80 - 10) / 10  # pixels
    assert [(x - 80) / second for x, _, _ in training] == pytest.approx([4, 6], abs=0.01)
    assert [width / second for _, _, width in training] == pytest.approx([1, 4], abs=0.01)


def test_chart_shows_the_newest_steps():
    spans = [Span(step, "training", 10.0 * step, 10.0 * step + 5) for step in range(1, 41)]
    assert len(bars(spans, "training")) == 12
    assert timeline.svg([]) == ""


def test_overlap_is_the_share_of_work_with_sampling():
    async def main() -> list[float]:
        busy = BusyTime()
        meter, shares = OverlapMeter(lambda: busy.seconds), []

        async def sample(seconds: float) -> None:
            with busy:
                await asyncio.sleep(seconds)

        for sampled in (2.0, 7.0):
            task = asyncio.create_task(sample(sampled))
            with meter.waiting():
                await asyncio.sleep(2.0)
            await asyncio.sleep(8.0)
            await task
            shares.append(meter.lap()["time/overlap"])
        return shares

    assert run_virtually(main()) == pytest.approx([0.0, 5 / 8])


@pytest.mark.parametrize("staleness", [0, 1])
def test_run_writes_its_timeline(tmp_path, staleness):
    run(settings(tmp_path, staleness=staleness, monitors=[{"type": "report"}]))
    spans = timeline.read(tmp_path)
    parts = {part: [span.step for span in spans if span.part == part] for part in ("sampling", "evaluation", "saving")}
    assert parts == {"sampling": [*range(1, 9)], "evaluation": [4, 8], "saving": [3, 6, 8]}
    assert all(span.begin <= span.end for span in spans)
    assert "Timeline of the newest steps" in (tmp_path / "report.html").read_text()
    trained = [row for row in rows(tmp_path, timeless=False) if "reward/mean" in row]
    assert all(0 <= row["time/overlap"] <= 1 for row in trained)
    assert all(sum(row[name] for name in row if name.startswith("policy/lag_")) == pytest.approx(1) for row in trained)
