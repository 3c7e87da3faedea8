"""Pages of rollouts: filters, one whole, its group beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.dashboard.run_folders import write_run
from tests.dashboard.test_run_pages import run_ids
from tinsmith.rl.record.monitors.jsonl import read_rollouts

Made = Callable[..., TestClient]


def shown(page: str) -> list[str]:
    return re.findall(r'<tr id="rollout-(.*?)"', page)


def test_filters_select_rollouts(dashboard: Made, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10)
    browser = dashboard()
    address = f"/runs/{next(run_ids(browser, tmp_path))}/rollouts"
    lines = read_rollouts(folder / "rollouts" / "train-000007.jsonl")
    right = [f"train-7-{number}" for number, line in enumerate(lines) if line["correct"]]
    assert shown(browser.get(address, params={"from": "7", "to": "7", "correct": "yes"}).text) == right
    assert shown(browser.get(address, params={"from": "7", "to": "7", "least": "1"}).text) == right
    needle = str(lines[2]["text"])
    assert "train-7-2" in shown(browser.get(address, params={"q": needle.upper()}).text)
    assert len(shown(browser.get(address, params={"kind": "all"}).text)) == 50
    assert shown(browser.get(address, params={"kind": "all", "page": "3"}).text)
    assert shown(browser.get(address, params={"task": "no such task"}).text) == []
    odd = {"from": "x", "to": "nan", "least": "1e999", "kind": "?", "sort": "; drop", "page": "-1", "correct": "?"}
    assert len(shown(browser.get(address, params=odd).text)) == 50


@pytest.mark.parametrize("color", ["", "logprob", "advantage", "difference", "?"])
def test_rollout_is_shown_whole_beside_its_group(dashboard: Made, tmp_path: Path, color: str) -> None:
    folder = write_run(tmp_path / "run", steps=10)
    browser = dashboard()
    run = next(run_ids(browser, tmp_path))
    page = browser.get(f"/runs/{run}/rollouts/train-7-5", params={"color": color}).text
    lines = read_rollouts(folder / "rollouts" / "train-000007.jsonl")
    assert page.count("<article") == 1 + 4
    assert f"/runs/{run}/rollouts/train-7-7" in page
    assert f"/runs/{run}/rollouts/train-7-3" not in page
    if color in ("", "?"):
        assert all(str(line["text"]) in page for line in lines[4:])
    assert "ro-reply" in browser.get("/static/rollout.css").text


LONG: dict[str, dict[str, object]] = {
    "text": {"turns": [{"text": "word " * 200_000}]},
    "turns": {"turns": [{"text": "a short one"}] * 20_000},
    "pieces": {"turns": [{"text": "<think>a</think>b" * 50_000}]},
    "tokens": {"turns": [{"text": "", "tokens": [1] * 100_000, "token_texts": ["a"] * 100_000}]},
}


@pytest.mark.parametrize("kind", LONG)
def test_long_rollouts_are_cut_and_shown_on_request(dashboard: Made, tmp_path: Path, kind: str) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    file = folder / "rollouts" / "train-000001.jsonl"
    lines = read_rollouts(file)
    for line in lines:
        line["trajectories"] = [{"role": "policy", **LONG[kind]}] if line["index"] < 2 else []
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    browser = dashboard()
    address = f"/runs/{next(run_ids(browser, tmp_path))}/rollouts/train-1-0"
    page = browser.get(address, params={"color": "logprob"}).text
    assert len(page) < 3_000_000
    link = re.search(r'href="([^"]*all=1)">show all', page)
    assert link is not None
    if kind == "text":
        whole = browser.get(address + link[1].replace("&amp;", "&")).text
        assert "word " * 200_000 in whole.replace("</div>", " ")


@pytest.mark.parametrize("name", ["train-7-99", "train-70-0", "x", "train-7", "train-7-0-0"])
def test_unknown_rollouts_are_404(dashboard: Made, tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "run", steps=10)
    browser = dashboard()
    assert browser.get(f"/runs/{next(run_ids(browser, tmp_path))}/rollouts/{name}").status_code == 404
