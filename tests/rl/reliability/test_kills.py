"""`kill -9` of a run at any instant, and the same command again, ends with the same weights, metrics and rollouts.

The order of the writes is the law: state.json is written after the checkpoint is on the server, and last of the files
of its step; a resumed run loads the checkpoint into a new model. To break it: in `Run._save`, call `states.add` before
`policy.save`; in `TinkerTrainer.connect`, ignore `state`; or in `RunFolder.open`, leave out `_discard_logs_after`.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.rl.reliability.kills import SECONDS, Work, outcome, start
from tests.rl.reliability.proxy import Action, Phase, proxied

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs", "in_folder")]


def run_killed(work: Work, name: str, plan: list[tuple[Phase, str, int]]) -> int:
    """Run until the end; kill the first process at the first instant of the plan, the second at the second, and so on.

    An instant is before or after the nth request of a name since the start of the process. Returns the number of kills.
    """
    left, counts, kills = list(plan), dict[tuple[Phase, str], int](), 0
    reached = threading.Event()

    def hook(phase: Phase, request: str) -> Action:
        if reached.is_set():
            return "hold"
        counts[phase, request] = counts.get((phase, request), 0) + 1
        if left and left[0] == (phase, request, counts[phase, request]):
            reached.set()
            return "hold"
        return "pass"

    while True:
        counts.clear()
        reached.clear()
        with proxied(work.url, hook) as proxy:
            process = start(work.folder, work.folder / name, proxy.url, work.key)
            deadline = time.monotonic() + SECONDS
            while process.poll() is None and not reached.is_set():
                assert time.monotonic() < deadline, (work.folder / f"{name}.log").read_text()
                time.sleep(0.005)
            process.kill()
            code = process.wait()
        if not reached.is_set():
            assert code == 0, (work.folder / f"{name}.log").read_text()
            return kills
        left.pop(0)
        kills += 1


def random_plan(seed: int, requests: list[tuple[Phase, str]], size: int) -> list[tuple[Phase, str, int]]:
    """Instants drawn from those of a run; early ones, so that each process makes some progress and is killed."""
    draw = random.Random(seed)
    seen = dict[tuple[Phase, str], int]()
    places = []
    for phase, name in requests[: len(requests) // 2]:
        seen[phase, name] = seen.get((phase, name), 0) + 1
        places.append((phase, name, seen[phase, name]))
    return [draw.choice(places) for _ in range(size)]


KILLS = 200
QUICK: list[tuple[Phase, str, int]] = [
    ("after", "create_model", 1),
    ("after", "forward_backward", 1),
    ("after", "optim_step", 1),
    ("before", "save_weights", 1),
    ("after", "save_weights", 1),
    ("after", "optim_step", 2),
    ("before", "optim_step", 1),
    ("after", "save_weights_for_sampler", 2),
    ("after", "asample", 4),
]


def test_run_killed_at_its_requests_ends_as_one_that_was_not(work):
    assert run_killed(work, "quick", QUICK) == len(QUICK)
    assert outcome(work.folder / "quick", work.data) == work.expected


def killed_by_time(work: Work, name: str, instants: Iterator[Callable[[Path], bool]]) -> int:
    """Run with a service of its own; each process is killed when the next instant is reached. Returns the kills."""
    folder, kills = work.folder / name, 0
    for reached in instants:
        process = start(work.folder, folder, "", "", "service={engine: fake, source: tiny}")
        deadline = time.monotonic() + SECONDS
        while process.poll() is None and not reached(folder):
            assert time.monotonic() < deadline, (work.folder / f"{name}.log").read_text()
            time.sleep(0.001)
        ended = process.poll()
        process.kill()
        process.wait()
        if ended is not None:
            assert ended == 0, (work.folder / f"{name}.log").read_text()
            return kills
        kills += 1
    assert start(work.folder, folder, "", "", "service={engine: fake, source: tiny}").wait(SECONDS) == 0
    return kills


def changed(pattern: str) -> Callable[[Path], bool]:
    """Whether a file of the run folder whose name matches has appeared or changed since the first call: of any step, as
    a kill that comes late leaves the next process another step than planned."""
    before: list[dict[Path, int]] = []

    def look(folder: Path) -> bool:
        now: dict[Path, int] = {}
        for path in folder.glob(pattern):
            with suppress(FileNotFoundError):  # deleted meanwhile
                now[path] = path.stat().st_mtime_ns
        before.append(now)
        return now != before[0]

    return look


def after(seconds: float) -> Callable[[Path], bool]:
    """Whether so much time has passed since the first call."""
    begin: list[float] = []

    def look(_: Path) -> bool:
        begin.append(time.monotonic())
        return begin[-1] - begin[0] > seconds

    return look


def test_run_killed_at_its_files_ends_as_one_that_was_not(work):
    files = ["rollouts/train-*.jsonl", "checkpoints/step-*.json", "state.json", "metrics.jsonl"]
    assert killed_by_time(work, "own", map(changed, files)) == len(files)
    assert outcome(work.folder / "own", work.folder / "own" / "service") == work.expected


@pytest.mark.slow
def test_200_kills_change_nothing(work):
    kills, violations, seed = 0, [], 0
    while kills < KILLS:
        seed += 1
        name = f"random-{seed}"
        if seed % 4:
            kills += run_killed(work, name, random_plan(seed, work.requests, 6))
            data = work.data
        else:
            draw = random.Random(seed)
            kills += killed_by_time(work, name, (after(draw.uniform(0.5, 6)) for _ in range(6)))
            data = work.folder / name / "service"
        if (result := outcome(work.folder / name, data)) != work.expected:
            violations.append((seed, {key for key in result if result[key] != work.expected[key]}))
        print(f"{kills} kills in {seed} runs, violations: {violations}", flush=True)
        shutil.rmtree(work.folder / name)
    assert violations == []
