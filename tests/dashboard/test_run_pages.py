"""Pages of runs: what they show is what is in the run's folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.dashboard.run_folders import write_run
from tinsmith.rl.record.monitors.jsonl import read_metrics

Made = Callable[..., TestClient]
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def ids(browser: TestClient) -> dict[str, str]:
    """Label of each run in the list -> its id."""
    page = browser.get("/runs").text
    return {label: run for run, label in re.findall(r'<a href="/runs/([0-9a-f]{12})">(.*?)</a>', page)}


def run_ids(browser: TestClient, folder: Path) -> Iterator[str]:
    return iter(ids(browser)[f"{folder.name}/{name}"] for name in sorted(path.name for path in folder.iterdir()))


def test_list_shows_state_step_and_reward(dashboard: Made, tmp_path: Path) -> None:
    write_run(tmp_path / "done", steps=12)
    (write_run(tmp_path / "killed", steps=10) / "log.txt").unlink()
    page = dashboard().get("/runs").text
    rows = {
        label: row for row, label in re.findall(r'(<tr id="run-.*?<a href=[^>]*>(.*?)</a>.*?</tr>)', page, re.DOTALL)
    }
    last = [row["reward/mean"] for row in read_metrics(tmp_path / "done") if "reward/mean" in row][-1]
    assert "finished" in rows[f"{tmp_path.name}/done"]
    assert "12 / 12" in rows[f"{tmp_path.name}/done"]
    assert f">{last:.4g}<" in rows[f"{tmp_path.name}/done"]
    assert "died" in rows[f"{tmp_path.name}/killed"]


def test_numbers_of_a_run_equal_its_metrics(dashboard: Made, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=25)
    browser = dashboard()
    page = browser.get(f"/runs/{next(run_ids(browser, tmp_path))}").text
    cells = {
        values["data-metric"]: json.loads(values["data-value"] or "")
        for _, values in Tags(page).tags
        if "data-metric" in values
    }
    last = {name: value for row in read_metrics(folder) for name, value in row.items() if name != "step"}
    assert cells == last


def test_curves_equal_the_metrics(dashboard: Made, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=25)
    browser = dashboard()
    charts = browser.get(f"/curves?run={next(run_ids(browser, tmp_path))}&metric=optim/steps").json()["charts"]
    by_title = {chart["title"]: chart for chart in charts}
    rows = read_metrics(folder)
    for title, label, name in (
        ("Reward", "reward/mean", "reward/mean"),
        ("Reward by part", "format", "reward/format"),
        ("Entropy (estimate, nats per token)", "optim", "optim/entropy"),
        ("Held-out accuracy (pass@k)", "pass@1", "eval/pass@1"),
        ("optim/steps", "optim/steps", "optim/steps"),
    ):
        chart = by_title[title]
        line = next(line for line in chart["lines"] if line["label"] == label)
        shown = {step: value for step, value in zip(chart["steps"], line["values"], strict=True) if value is not None}
        assert shown == {int(row["step"]): row[name] for row in rows if name in row}


def test_curves_are_sent_once_per_change(dashboard: Made, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    browser = dashboard()
    address = f"/curves?run={next(run_ids(browser, tmp_path))}"
    tag = browser.get(address).headers["etag"]
    assert browser.get(address, headers={"if-none-match": tag}).status_code == 304
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 21, "reward/mean": 0.5}\n{"step": 22, "rew')
    response = browser.get(address, headers={"if-none-match": tag})
    assert response.status_code == 200
    assert response.json()["charts"][0]["steps"][-1] == 21


def test_copied_folder_is_a_run_of_its_own(dashboard: Made, tmp_path: Path) -> None:
    shutil.copytree(write_run(tmp_path / "a" / "run"), tmp_path / "b" / "run")
    assert sorted(ids(dashboard())) == [f"{tmp_path.name}/a/run", f"{tmp_path.name}/b/run"]


def test_parts_of_a_run_have_pages(dashboard: Made, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", steps=1)
    write_run(folder / "explore-2", steps=3)
    (folder / "bench").mkdir()
    (folder / "bench" / "run.yaml").write_text('{"name": "one"}')
    rows = [{"checkpoint": f"tinker://{step}", "eval/pass@1": step / 4, "eval/tasks": 20.0} for step in (1, 3)]
    (folder / "bench" / "results.json").write_text(json.dumps(rows))
    browser = dashboard()
    label = tmp_path.name
    pages = dict(re.findall(r'<a href="(/runs/[0-9a-f]{12})">([^<]*)</a>', browser.get("/runs").text))
    addresses = {name: address for address, name in pages.items()}
    assert set(addresses) == {f"{label}/one", f"{label}/one/explore-2", f"{label}/one/bench"}
    whole = browser.get(addresses[f"{label}/one"]).text
    assert addresses[f"{label}/one/bench"] in whole
    bench = browser.get(addresses[f"{label}/one/bench"]).text
    assert "finished" in bench
    assert re.search(r"tinker://1</th>.*tinker://3</th>.*eval/pass@1</td>.*>0.25</td>.*>0.75</td>", bench, re.DOTALL)
    assert "3 / 3" in browser.get(addresses[f"{label}/one/explore-2"]).text


def test_list_is_searched_by_words(dashboard: Made, tmp_path: Path) -> None:
    write_run(tmp_path / "first", model={"name": "Qwen/Qwen3-0.6B"})
    write_run(tmp_path / "second")
    page = dashboard().get("/runs", params={"q": "QWEN finished"}).text
    assert "/first<" in page
    assert "/second<" not in page
    assert "No run matches" in dashboard().get("/runs", params={"q": "<nothing>"}).text


def test_runs_that_differ_are_compared_task_by_task(dashboard: Made, tmp_path: Path) -> None:
    write_run(tmp_path / "high", seed=1)
    write_run(tmp_path / "low", seed=1, gain=0.1, group_size=16)
    browser = dashboard()
    page = browser.get("/compare", params={"run": list(run_ids(browser, tmp_path))}).text
    assert "group_size" in page
    assert "learning_rate" not in page
    assert "p (permutation)" in page
    charts = browser.get("/curves", params={"run": list(run_ids(browser, tmp_path))}).json()["charts"]
    assert [line["label"] for line in charts[0]["lines"]] == [f"{tmp_path.name}/high", f"{tmp_path.name}/low"]


def test_seeds_are_one_line_with_a_band(dashboard: Made, tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"seed-{seed}", seed=seed)
    browser = dashboard()
    chart = browser.get("/curves", params={"run": list(run_ids(browser, tmp_path))}).json()["charts"][0]
    [line] = chart["lines"]
    runs = [
        {int(row["step"]): row.get("reward/mean") for row in read_metrics(tmp_path / f"seed-{seed}")}
        for seed in range(3)
    ]
    at = chart["steps"].index(7)
    values = [run[7] for run in runs]
    assert (line["low"][at], line["high"][at]) == (min(values), max(values))
    assert line["values"][at] == pytest.approx(sum(values) / 3)


def test_text_of_models_and_files_is_escaped(dashboard: Made, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", description=HOSTILE, model={"name": HOSTILE}, algorithm={"type": HOSTILE})
    (folder / "log.txt").write_text(f"2026-11-21 16:00:00,123 ERROR tinsmith.rl: The run was stopped by {HOSTILE}\n")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 21, f"reward/{HOSTILE}": 1.0}) + "\n")
    row = {"source": HOSTILE, "measure": HOSTILE, "first": HOSTILE, "second": HOSTILE}
    (folder / "comparison.json").write_text(json.dumps([row]))
    rollouts = folder / "rollouts" / "train-000020.jsonl"
    rollouts.write_text(rollouts.read_text().replace("sums/", json.dumps(HOSTILE)[1:-1]))
    browser = dashboard()
    run = next(run_ids(browser, tmp_path))
    for path in (
        "/runs",
        f"/runs/{run}",
        f"/compare?run={run}",
        f"/runs/{run}/rollouts",
        f"/runs/{run}/rollouts/train-20-0?color=logprob",
        f"/runs?q={HOSTILE}",
    ):
        response = browser.get(path)
        assert response.status_code == 200
        assert HOSTILE[:8] not in response.text.replace('<script defer src="/static/', "")
        tags = Tags(response.text).tags
        assert not [tag for tag, values in tags if tag == "img" or any(name.startswith("on") for name in values)]


def test_pages_use_no_inline_code_or_style(dashboard: Made, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    browser = dashboard()
    run = next(run_ids(browser, tmp_path))
    for path in ("/runs", f"/runs/{run}", f"/compare?run={run}", f"/runs/{run}/rollouts", "/login"):
        for tag, values in Tags(browser.get(path).text).tags:
            assert tag != "style"
            assert "style" not in values
            assert tag != "script" or values["src"]


def test_damaged_folders_have_pages(dashboard: Made, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    odd = (
        b"[1]",
        b'{"a": 1}',
        b'{"step": "x"}',
        b'{"step": 3, "part": [], "begin": 0, "reward/mean": "<b>"}',
        b"\xff{[: {\n\0",
    )
    for name in ("run.yaml", "metrics.jsonl", "state.json", "comparison.json", "timeline.jsonl"):
        (folder / name).write_bytes(b"\n".join(odd))
    browser = dashboard()
    run = next(run_ids(browser, tmp_path))
    for path in ("/runs", f"/runs/{run}", f"/runs/{run}/verdict", f"/compare?run={run}", f"/curves?run={run}"):
        assert browser.get(path).status_code == 200, path


@pytest.mark.parametrize("path", ["/runs/../run.yaml", "/runs/x", "/static/../app.py", "/static/%2e%2e%2fapp.py", "/x"])
def test_unknown_pages_are_404(dashboard: Made, path: str) -> None:
    assert dashboard().get(path).status_code == 404


def test_every_asset_of_a_page_is_served(dashboard: Made) -> None:
    browser = dashboard()
    assets = [
        values.get("src") or values.get("href")
        for tag, values in Tags(browser.get("/runs").text).tags
        if tag in ("script", "link")
    ]
    local = [asset for asset in assets if asset and not asset.startswith("data:")]
    assert len(local) == 5
    assert all(browser.get(asset).status_code == 200 for asset in local)
    assert {browser.get(f"/static/{name}.LICENSE.txt").status_code for name in ("htmx", "uplot")} == {200}
