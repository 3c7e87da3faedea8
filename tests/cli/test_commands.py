"""The command line end to end: runs that are killed and resumed, serve, demo, and error messages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tinsmith.cli import app, main

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

RUN_FILE = """
model: {name: tiny, rank: 4}
tasks:
  train: {type: addition}
  held_out: 6
rewards:
  - {type: format, pattern: ".*[aeiou].*"}
  - {type: custom, path: "pace:pace"}
sampling: {max_tokens: 4}
optimizer: {learning_rate: 0.05}
steps: 12
groups_per_step: 4
group_size: 4
eval: {every: 4}
checkpoint: {every: 2}
service: {engine: fake, source: tiny}
"""

SUPERVISED_FILE = """
model: {name: tiny, rank: 4}
algorithm: {type: sft}
demonstrations: {data: {type: addition}, per_step: 4}
optimizer: {learning_rate: 0.003}
steps: 60
checkpoint: {every: 2}
service: {source: tiny, dtype: bfloat16, threads: 1}
"""


PACE = """
import os, select, signal, time
from pathlib import Path

calls = 0

def pace(task, rollout):
    global calls
    calls += 1
    time.sleep(float(os.environ.get("PACE_S", "0")))
    if calls == int(os.environ.get("HOLD_AT", "0")):
        hold(Path(os.environ["HOLDS"]))
    return 0.0

def hold(file):
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    file.touch()
    while file.exists() and not select.select([read], [], [], 0.01)[0]:
        pass
    signal.set_wakeup_fd(before)
"""
"""A reward whose call HOLD_AT in a process makes the file HOLDS, and returns once a signal has arrived or a test has
removed the file; each call takes PACE_S seconds."""
HOLD_AT = 100
"""A call in step 6, of 12: 16 in a step, 6 in an evaluation."""
STEPS = 12


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """Working directory with a run file and a link to the tiny Llama."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "tiny").symlink_to(tiny_llama)
    (folder / "small.yaml").write_text(RUN_FILE)
    (folder / "supervised.yaml").write_text(SUPERVISED_FILE)
    (folder / "pace.py").write_text(PACE)
    return folder


def environment() -> dict[str, str]:
    """Environment of a command: without TINKER variables, one thread, 100 columns."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    return {**clean, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def tinsmith(work: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `work` to its end; `extra` are environment variables."""
    command = [sys.executable, "-m", "tinsmith", *words]
    return subprocess.run(
        command, cwd=work, capture_output=True, text=True, timeout=200, check=False, env={**environment(), **extra}
    )


@pytest.fixture(scope="module")
def complete_run(work: Path) -> subprocess.CompletedProcess[str]:
    """A run that is not interrupted."""
    return tinsmith(work, "run", "small.yaml")


def wait_for(holds: Callable[[], bool], log: Path) -> None:
    """Wait until `holds()`, at most 200 seconds; `log` is shown if it does not."""
    deadline = time.monotonic() + 200
    while not holds():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def run_and_send(work: Path, number: int, folder: str, *overrides: str) -> int:
    """Start a run, send it a signal in the middle of a step, and return its exit status."""
    command = [sys.executable, "-m", "tinsmith", "run", "small.yaml", f"folder={folder}", *overrides]
    holds = work / "holds"
    holds.unlink(missing_ok=True)
    with (work / "log").open("w") as log:
        variables = {**environment(), "HOLD_AT": str(HOLD_AT), "HOLDS": str(holds)}
        process = subprocess.Popen(command, cwd=work, stdout=log, stderr=log, env=variables)
        wait_for(holds.exists, work / "log")
        process.send_signal(number)
        process.wait(100)
    assert 0 < json.loads((work / folder / "state.json").read_text())["step"] < STEPS
    return process.returncode


def metrics(folder: Path) -> list[dict[str, float]]:
    """Rows of a run's metrics.jsonl, without metrics that depend on time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "speed/"))} for row in rows]


def test_run_needs_only_a_run_file(work, complete_run):
    assert complete_run.returncode == 0, complete_run.stderr
    assert f"small is finished: {STEPS} steps" in complete_run.stdout
    assert re.search(r"serve with  tinsmith serve --data \S+ --model \S+ engine=fake\n", complete_run.stdout)
    assert "held out before training" in complete_run.stdout
    folder = work / "runs" / "small"
    assert {"run.yaml", "state.json", "metrics.jsonl", "report.html", "rollouts", "service"} <= {
        path.name for path in folder.iterdir()
    }
    reward = [row["reward/mean"] for row in metrics(folder) if "reward/mean" in row]
    assert len(reward) == STEPS
    assert sum(reward[4:]) > sum(reward[:4])


def test_killed_run_resumes_with_equal_metrics(work, complete_run):
    run_and_send(work, signal.SIGKILL, "runs/broken")
    resumed = tinsmith(work, "run", "small.yaml", "folder=runs/broken")
    assert resumed.returncode == 0, resumed.stderr
    assert metrics(work / "runs" / "broken") == metrics(work / "runs" / "small")


def assert_resumes(work: Path, name: str, *settings: str, rounding: float = 0.0) -> None:
    """Assert that a run that is killed and restarted has the metrics of an uninterrupted one, but for `rounding`."""
    done = tinsmith(work, "run", "small.yaml", f"folder=runs/{name}", *settings)
    assert done.returncode == 0, done.stderr
    run_and_send(work, signal.SIGKILL, f"runs/{name}-broken", *settings)
    assert tinsmith(work, "run", "small.yaml", f"folder=runs/{name}-broken", *settings).returncode == 0
    resumed, expected = metrics(work / "runs" / f"{name}-broken"), metrics(work / "runs" / name)
    assert resumed == [pytest.approx(row, rel=rounding, abs=rounding) for row in expected]


@pytest.mark.slow
def test_killed_float32_run_resumes_with_equal_metrics(work):
    # Rounding depends on what shares a batch of the sampler, and on the prefixes in its cache, which a kill empties.
    real = (
        "service.engine=torch",
        "service.dtype=float32",
        "service.threads=1",
        "concurrency=1",
        "optimizer.learning_rate=0.003",
    )
    assert_resumes(work, "real", *real, rounding=1e-5)


@pytest.mark.slow
def test_killed_bfloat16_run_resumes_bit_identically(work):
    """Without samples: in bfloat16, the rounding of a shared batch can change sampled replies."""
    words = (sys.executable, "-m", "tinsmith", "run", "supervised.yaml", "folder=runs/supervised-broken")
    assert tinsmith(work, "run", "supervised.yaml", "folder=runs/supervised").returncode == 0
    state = work / "runs" / "supervised-broken" / "state.json"
    with (work / "log").open("w") as log:
        process = subprocess.Popen(words, cwd=work, stdout=log, stderr=log, env=environment())
        wait_for(lambda: state.exists() and json.loads(state.read_text())["step"] >= 6, work / "log")
        process.kill()
        process.wait(100)
    assert json.loads(state.read_text())["step"] < 60
    assert tinsmith(work, *words[3:]).returncode == 0
    assert metrics(work / "runs" / "supervised-broken") == metrics(work / "runs" / "supervised")


def test_run_uses_the_server_in_the_environment(work, tiny_llama):
    from tinsmith.service.config import ServeConfig
    from tinsmith.service.embedded import embedded

    with embedded(ServeConfig(models=(f"tiny={tiny_llama}",), engine="fake", data=work / "served")) as (url, key):
        words = ("run", "--config", "small.yaml", "steps=1", "folder=runs/there")
        done = tinsmith(work, *words, TINKER_BASE_URL=url, TINKER_API_KEY=key)
        assert done.returncode == 0, done.stderr
        assert not (work / "runs" / "there" / "service").exists()
        refused = tinsmith(work, *words[:-1], "folder=runs/other", TINKER_BASE_URL=url, TINKER_API_KEY="tml-wrong")
        odd = tinsmith(work, *words[:-1], "folder=runs/other", TINKER_BASE_URL=url, TINKER_API_KEY="sk-wrong")
    assert (refused.returncode, odd.returncode) == (2, 2)
    assert "rejected the API key" in refused.stderr
    assert "does not begin with tml-" in odd.stderr
    assert "Traceback" not in refused.stderr + odd.stderr


def test_demo_prints_accuracy_before_and_after(work, tiny_llama):
    small = ("service.engine=fake", f"service.source={tiny_llama}", "steps=2", "tasks.held_out=8", "groups_per_step=2")
    done = tinsmith(work, "demo", "--quick", "--seed", "3", "--out", "runs/demo", *small)
    assert done.returncode == 0, done.stderr
    assert "question: Which is the largest of" in done.stdout
    assert "held-out exact match 0.000 → 0.000 on 8 tasks never trained on" in done.stdout
    assert "runs/demo/report.html" in done.stdout
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert f"tinsmith serve --data runs/demo/service --model {name}={tiny_llama}" in done.stdout
    assert "0.25" in (work / "runs" / "demo" / "report.html").read_text()


def test_stages_run_in_order_on_one_server_and_resume(work, tiny_llama):
    example = Path(__file__).parents[2] / "examples" / "sft_then_grpo.yaml"
    small = ("service.engine=fake", f"service.source={tiny_llama}", "stages.0.steps=3", "tasks.held_out=4")
    words = ("run", str(example), "folder=runs/staged", "groups_per_step=2", "group_size=2", *small)
    first = tinsmith(work, *words, "stages.1.steps=1")
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("Starting a service") == 1
    assert re.search(r"serve with  tinsmith serve --data \S*runs/staged/service ", first.stdout)
    again = tinsmith(work, *words, "stages.1.steps=3")
    assert again.returncode == 0, again.stderr
    assert "stage 2 of 2: grpo" in again.stdout
    assert "02-grpo/report.html" in again.stdout.replace("\n", "")
    folder = work / "runs" / "staged"
    supervised = [row for row in metrics(folder / "01-sft") if "optim/expert_nll" in row]
    rewarded = [row["step"] for row in metrics(folder / "02-grpo") if "reward/mean" in row]
    assert (len(supervised), rewarded) == (3, [1, 2, 3])
    assert (folder / "service").is_dir()
    assert not (folder / "01-sft" / "service").exists()


def test_serve_responds_until_terminated(work, tiny_llama):
    command = [sys.executable, "-m", "tinsmith", "serve", "engine=fake", "--model", f"tiny={tiny_llama}"]
    command += ["--model", "other=toy", "--port", "0", "--data", str(work / "data"), "--api-key", "tml-mine"]
    with (work / "serve.log").open("w") as log:
        process = subprocess.Popen(command, cwd=work, stdout=log, stderr=log, env=environment())
    shown = work / "serve.log"
    wait_for(lambda: re.search(r"http://\S+\s", shown.read_text()) is not None, shown)
    url = next(word for word in shown.read_text().split() if "http://" in word).rpartition("=")[2]
    wait_for(lambda: status(f"{url}/api/v1/healthz") != 503, shown)
    assert status(f"{url}/api/v1/healthz") == 200
    process.terminate()
    assert process.wait(100) == 0


def status(url: str) -> int:
    """HTTP status of a GET request."""
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def test_serve_prints_a_new_key_once_and_never_logs_it(work):
    command = [
        sys.executable,
        "-m",
        "tinsmith",
        "serve",
        "engine=fake",
        "--model",
        "toy",
        "--port",
        "0",
        "--data",
        "data",
    ]
    shown = []
    for _ in range(2):
        process = subprocess.Popen(
            command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )
        assert process.stderr is not None
        log = next(line for line in process.stderr if "Ready" in line)
        process.terminate()
        out, rest = process.communicate(timeout=100)
        shown.append(out)
        assert "tml-" not in log + rest
    assert shown == [f"TINKER_API_KEY={(work / 'data' / 'api-key').read_text()}", ""]


def error_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """The exit status and standard error of a command."""
    monkeypatch.setattr(sys, "argv", ["tinsmith", *words])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("run",), "error: tinsmith run needs a run file. Example: tinsmith run"),
        (("run", "none.yaml"), "error: There is no file none.yaml. Check the path."),
        (("run", "small.yaml", "stepz=3"), "the command line: there is no key 'stepz'. Did you mean 'steps'?"),
        (("run", "small.yaml", "model.rnk=3"), "there is no key 'model.rnk'. Did you mean 'model.rank'?"),
        (
            ("run", "small.yaml", "group_size=1"),
            "small.yaml: group_size 1 leaves no rollouts to compare; set it to 2 or more",
        ),
        (("run", "small.yaml", "tasks.held_out=0"), "eval needs held-out tasks"),
        (
            ("run", "small.yaml", "model.base_url=http://127.0.0.1:9", "folder=x"),
            "There is no API key for http://127.0.0.1:9.",
        ),
        (("serve", "port=99999"), "'port': Input should be less than or equal to 65535 (got 99999)."),
        (
            ("serve", "--host", "no.such.host", "--port", "0"),
            "Name or service not known. Give a --host of this machine",
        ),
        (("serve", "portt=3"), "there is no key 'portt'. Did you mean 'port'?"),
        (("serve", "--api-key", "sk-1"), "api_key must start with tml-"),
        (
            ("serve", "--data", "small.yaml", "engine=fake", "port=0"),
            "small.yaml cannot be written: File exists. Set --data",
        ),
        (
            ("keys", "create", "a", "--data", "small.yaml/x"),
            "cannot be written: Not a directory. Set --data to another",
        ),
        (("run", "small.yaml", "folder=small.yaml"), "small.yaml cannot be written: File exists. Set folder to"),
        (("keys", "create", "a b", "--data", "kept"), "'a b' cannot name a key or a tenant."),
        (
            ("keys", "create", "a", "--expires", "3y", "--data", "kept"),
            "--expires is '3y'. Use minutes, hours or days",
        ),
        (("keys", "create", "a", "--queued", "many", "--data", "kept"), "--queued is 'many'. Use a number"),
        (("keys", "revoke", "a", "--data", "kept"), "There is no key 'a'."),
        (("keys", "limit", "a", "--data", "kept"), "There is no quota to change."),
        (("keys", "list", "--database", "mysql://x"), "give postgresql+psycopg://"),
        (("serve", "--prt", "3"), "Did you mean --port?"),
        (("rn",), 'error: Unknown command "rn". Did you mean "run"?'),
        (("train", "small.yaml"), 'error: Unknown command "train". Did you mean "run"?'),
        (("small.yaml",), "To train from a run file: tinsmith run small.yaml"),
        (("config", "small.yaml"), "To print a run file with all its settings: tinsmith config show small.yaml"),
        (("models", "pul", "x"), "tinsmith models does not take 'pul'. Did you mean 'pull'? Its commands: pull, load"),
        (("log", "a", "b"), "tinsmith log does not take 'b'. tinsmith log --help"),
        (("log", "-l", "loud"), 'Choose from: "DEBUG", "INFO", "WARNING", "ERROR". --help'),
        (
            ("check", "small.yaml", "rewards.9.type=closeness"),
            "'rewards.9.type' is beyond the end of its list",
        ),
        (("demo", "stepz=3"), "Did you mean 'steps'?"),
    ],
)
def test_user_errors_are_printed_as_sentences(work, capsys, monkeypatch, words, sentence):
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(work)
    status, text = error_of(capsys, monkeypatch, *words)
    assert status == 2
    assert sentence in text
    assert "Traceback" not in text


def test_debug_flag_prints_the_traceback(work, monkeypatch):
    from tinsmith.errors import ConfigError

    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "argv", ["tinsmith", "--debug", "run", "none.yaml"])
    with pytest.raises(ConfigError, match=r"There is no file none\.yaml"):
        main()


def test_failed_service_start_prints_the_reason(work):
    done = tinsmith(work, "run", "small.yaml", "service.engine=torch", "service.source=/no/such.gguf", "folder=runs/no")
    assert done.returncode == 2
    assert "error: The service did not start: " in done.stderr
    assert "Its log is runs/no/service/serve.log." in done.stderr
    assert "Traceback" not in done.stderr


def test_limits_of_tenants_without_a_key_are_noted(tmp_path, capsys, monkeypatch):
    """A misspelt tenant would have quotas that nobody notices."""
    for words in (("create", "alice"), ("limit", "alice", "--models", "4"), ("limit", "alcie", "--models", "4")):
        monkeypatch.setattr(sys, "argv", ["tinsmith", "keys", *words, "--data", str(tmp_path)])
        with suppress(SystemExit):
            main()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("No key")] == [
        "No key belongs to alcie yet: tinsmith keys list shows the tenants."
    ]


def test_completion_is_installed(tmp_path, capsys):
    app(["--install-completion", "--shell", "fish", "--output", str(tmp_path / "x")], result_action="return_value")
    assert "checkpoint" in (tmp_path / "x").read_text()
    assert "installed" in capsys.readouterr().out
