"""The commands check, config show and config convert on files of Trinity, and API keys from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.integrations.trinity.files import SMALL, TINKER, VERL, with_key, write
from tinsmith import cli
from tinsmith.dialects import read_run
from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.runner import api_key

OURS = Path(__file__).parents[3] / "examples" / "addition.yaml"


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[str, str, int]:
    """Standard output, standard error, exit status."""
    monkeypatch.setattr("sys.argv", ["tinsmith", *words])
    status = 0
    try:
        cli.main()
    except SystemExit as end:
        status = int(end.code or 0)
    printed = capsys.readouterr()
    return printed.out, " ".join(printed.err.split()), status


def test_check_prints_a_summary_and_notes(capsys, monkeypatch):
    out, err, status = run(capsys, monkeypatch, "check", str(VERL))
    assert status == 0
    assert "a file of Trinity-RFT, is valid: grpo_std on meta-llama/Llama-3.2-3B, 1 epoch" in out
    assert "explorer.rollout_model.gpu_memory_utilization: the server decides" in err
    assert run(capsys, monkeypatch, "check", str(OURS))[2] == 0


def test_check_reports_every_fault_and_writes_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, with_key(with_key(SMALL, "algorithm.algorithm_type", "grop"), "mode", "serve"))
    out, err, status = run(capsys, monkeypatch, "check", str(file))
    assert (out, status) == ("", 2)
    assert "Did you mean 'grpo'?" in err
    assert "tinsmith serve" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.yaml"]


def test_check_is_strict_on_tinsmith_files(capsys, monkeypatch, tmp_path):
    file = write(tmp_path, {"model": {"name": "m", "rnk": 8}, "tasks": {"train": {"type": "addition"}}, "steps": 1})
    _, err, status = run(capsys, monkeypatch, "check", str(file))
    assert status == 2
    assert "Did you mean 'model.rank'?" in err


def test_show_prints_every_setting(capsys, monkeypatch):
    out, _, status = run(capsys, monkeypatch, "config", "show", str(TINKER), "steps=3")
    values = yaml.safe_load(out)
    assert status == 0
    assert (values["model"]["rank"], values["steps"], values["algorithm"]["type"]) == (32, 3, "grpo_std")
    fields = RunConfig.model_fields.items()
    assert values.keys() == {field.serialization_alias or name for name, field in fields}


@pytest.mark.parametrize("file", [TINKER, VERL, OURS], ids=lambda file: file.stem)
def test_converted_file_is_the_same_run(file, capsys, monkeypatch, tmp_path):
    out = tmp_path / "ours.yaml"
    assert run(capsys, monkeypatch, "config", "convert", str(file), "--out", str(out))[2] == 0
    again = read_run(out)
    assert again.dialect == ""
    assert again.settings.model_dump() == read_run(file).settings.model_dump()
    assert "already exists" in run(capsys, monkeypatch, "config", "convert", str(file), "--out", str(out))[1]


def test_convert_escapes_dollar_braces(capsys, monkeypatch, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }} costs ${price}")
    file = write(tmp_path, with_key(SMALL, "model.chat_template_path", str(template)))
    out = tmp_path / "ours.yaml"
    run(capsys, monkeypatch, "config", "convert", str(file), "--out", str(out))
    assert read_run(out).settings.model.chat_template == "{{ messages }} costs ${price}"


def test_api_key_has_two_environment_names(monkeypatch, capsys):
    for name in ("TINKER_API_KEY", "TRINITY_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="There is no API key"):
        api_key("http://there")
    monkeypatch.setenv("TRINITY_API_KEY", "tml-one")
    assert api_key("http://there") == "tml-one"
    monkeypatch.setenv("TINKER_API_KEY", "tml-one")
    assert api_key("http://there") == "tml-one"
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TINKER_API_KEY", "tml-two")
    assert api_key("http://there") == "tml-two"
    assert "TINKER_API_KEY is used" in capsys.readouterr().err
