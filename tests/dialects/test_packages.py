"""The package of docs/code/packages.md: its files run, and its type of environments is one."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Annotated

import pytest
import yaml

from tests.cli.test_commands import environment
from tests.rl.scripted_run import rows
from tests.rl.scripted_run import run as train
from tinsmith import cli, entry_points
from tinsmith.dialects import dialects, find_dialect, read_run
from tinsmith.dialects.base import Copied, Dialect, Section, has_key, keys
from tinsmith.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "code" / "packages.md").read_text()
FILES = dict(re.findall(r"```\w+\n# ([\w./]+)\n(.*?)```", PAGE, re.DOTALL))


def install(folder: Path, points: str, name: str = "acme-tinsmith") -> Path:
    """Install a package in a folder, as pip does with --target, with these entry points."""
    information = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(points)
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the installed package of the page."""
    groups = tomllib.loads(FILES["pyproject.toml"])["project"]["entry-points"]
    points = "".join(f"[{group}]\n{name} = {value}\n" for group, each in groups.items() for name, value in each.items())
    folder = install(tmp_path / "site", points)
    for name, text in FILES.items():
        file = (folder if name.endswith(".py") else tmp_path) / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package is installed for this process."""
    monkeypatch.syspath_prepend(site)
    return site.parent


def test_dialect_of_a_package_is_read(installed: Path) -> None:
    run = read_run(installed / "numbers.yaml", ["rounds=7", "group_size=2"])
    assert (run.dialect, run.guide) == ("Acme", "https://acme.example/tinsmith")
    assert (run.settings.model.name, run.settings.steps, run.settings.group_size) == ("tiny", 7, 2)
    assert (run.settings.rewards[0].type, run.settings.tasks.train.type) == ("closeness", "addition")
    assert run.notes == ("gpus: the server decides how many GPUs it uses.",)


def test_faults_are_in_words_of_the_package(installed: Path) -> None:
    file = installed / "numbers.yaml"
    for text, fault in (
        ("goal: additon", "'goal'.*Did you mean 'addition'"),
        ("gaol: addition", "Did you mean 'goal'"),
    ):
        file.write_text(FILES["numbers.yaml"].replace("goal: addition", text))
        with pytest.raises(ConfigError, match=f"(?s)read as a file of Acme, because it has 'learner'.*{fault}"):
            read_run(file)


def test_dialects_of_packages_come_first(installed: Path) -> None:
    """Keys of minds_RL, and of formats that are not read, do not keep a file from the package that reads it."""
    for other in ({"envs": []}, {"model_name_or_path": "tiny"}, {"pretrain": "tiny"}):
        dialect = find_dialect({"learner": {}, **other})
        assert dialect is not None
        assert dialect.name == "Acme"
    (installed / "trl.yaml").write_text("model_name_or_path: tiny")
    with pytest.raises(ConfigError, match="a file of TRL") as error:
        read_run(installed / "trl.yaml")
    assert "those of Acme, minds_RL, rLLM and Trinity-RFT" in error.value.hint


def test_run_of_a_package_trains(installed: Path) -> None:
    run = read_run(installed / "numbers.yaml", ["group_size=4", "monitors=[]", f"folder={installed}/run"])
    assert train(run.settings).step == 3
    assert [row["step"] for row in rows(installed / "run") if "reward/mean" in row] == [1, 2, 3]


def test_commands_take_environments_of_a_package(site: Path) -> None:
    variables = {**environment(), "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "tinsmith", "check", "parity.yaml"]
    done = subprocess.run(command, cwd=site.parent, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "95 tasks" in done.stdout


def test_conversion_writes_the_run_file(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tinsmith", "config", "convert", str(installed / "numbers.yaml")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None)
    assert yaml.safe_load(capsys.readouterr().out)["rewards"] == [{"type": "closeness"}]


@pytest.mark.parametrize(
    ("points", "fault"),
    [
        ("acme = acme_absent:DIALECT", "in the package faulty: acme_absent:DIALECT cannot be imported.*ModuleNotFound"),
        ("acme = json:dumps", "in the package faulty: json:dumps is no Dialect"),
        ("trinity = json:dumps", "faulty and tinsmith both have an entry point trinity"),
    ],
)
def test_faulty_entry_points_name_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: str, fault: str
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "site", f"[tinsmith.dialects]\n{points}\n", "faulty"))
    with pytest.raises(ConfigError, match=fault):
        dialects()


def test_source_tree_needs_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [dialect.name for dialect in dialects()]
    monkeypatch.syspath_prepend(tmp_path)  # another path, so that packages are looked for again
    monkeypatch.setattr(entry_points.metadata, "entry_points", lambda group: ())
    assert [dialect.name for dialect in dialects()] == installed


def test_dialects_of_tinsmith_are_found() -> None:
    assert {dialect.name for dialect in entry_points.load("tinsmith.dialects", Dialect).values()} == {
        "minds_RL", "rLLM", "Trinity-RFT",
    }  # fmt: skip


def test_fields_of_sections_in_a_list_are_keys() -> None:
    class Part(Section):
        kind: Annotated[str, Copied("name")]

    class File(Section):
        parts: list[Part]

    assert [key.path for key in keys(File)] == ["parts[].kind"]
    assert has_key(File, ["parts", "0", "kind"])
    assert not has_key(File, ["parts", "0", "size"])


def test_field_without_a_fate_is_named_with_what_to_write() -> None:
    class File(Section):
        size: int

    with pytest.raises(TypeError, match=r"File.size has no fate: .* @translates\(File, size=…\)"):
        list(keys(File))
