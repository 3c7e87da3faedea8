"""The container image: no daemon runs here, so its file is parsed, and the steps that matter are run in this venv."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest

from tests.service.support.process import free_port

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "Containerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, argument) of each line, continuation lines joined."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def last(name: str) -> str:
    return [argument for instruction, argument in instructions() if instruction == name][-1]


def test_copied_files_exist_and_are_not_ignored() -> None:
    allowed = (ROOT / "deploy" / "Containerfile.dockerignore").read_text().splitlines()
    for instruction, argument in instructions():
        if instruction == "COPY" and not argument.startswith("--from"):
            for path in argument.split()[:-1]:
                assert (ROOT / path).exists()
                assert f"!{path}" in allowed
    assert allowed[0] == "*"


def test_installed_extras_and_python_are_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = re.findall(r"'\.\[(.+?)\]'", FILE.read_text())
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    versions = re.findall(r"python:(\d+\.\d+)-slim", FILE.read_text())
    assert set(versions) == {"3.11"}  # constraints.txt is of this version
    assert "Python 3.11" in (ROOT / "constraints.txt").read_text().splitlines()[0]


def test_image_runs_as_a_user_without_rights() -> None:
    user = last("USER")
    assert user != "root"
    made = next(argument for name, argument in instructions() if name == "RUN" and "useradd" in argument)
    assert f" {user} " in made
    for folder in ("/data", "/models"):  # a volume gets the owner and mode of the folder in the image
        assert folder in made
        assert folder in json.loads(last("VOLUME"))


@pytest.mark.usefixtures("forked_programs")
def test_entry_point_serves_and_its_health_check_passes(tmp_path: Path, forked_programs: str) -> None:
    """A public bind needs a key, which the first command in the file's head makes."""
    port, data = str(free_port()), str(tmp_path / "data")
    entry = json.loads(last("ENTRYPOINT"))
    assert entry == ["tinsmith"]
    command = [word.replace("8000", port).replace("/data", data) for word in json.loads(last("CMD"))]
    [keys] = re.findall(r"^#   podman run --rm .* tinsmith (keys create .*)$", FILE.read_text(), re.MULTILINE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "tinsmith"]
    subprocess.run([*program, *keys.replace("/data", data).split()], check=True, env=environment, capture_output=True)
    check = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    check = [forked_programs, *(word.replace("8000", port) for word in check[1:])]
    serve = [*program, *command, "engine=fake", "models=toy"]
    with subprocess.Popen(serve, env=environment, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(f"http://127.0.0.1:{port}/livez")
            assert subprocess.run(check, capture_output=True, timeout=100).returncode == 0
        finally:
            server.terminate()
        assert server.wait(100) == 0
    assert subprocess.run(check, capture_output=True, timeout=100).returncode != 0


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"{url} does not answer")
