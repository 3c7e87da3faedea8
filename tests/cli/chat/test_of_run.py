"""Chats with the weights of runs: which weights at which server, and the run's own system prompt and sampling."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.rl.history.test_checkpoints import write_run
from tests.rl.history.test_transcript import record
from tinsmith.cli.chat.of_run import has_own_template, reply_settings, system_prompt, unused_settings
from tinsmith.cli.service.weights import CheckpointChoice, SamplingServer, ServedWeights, open_weights
from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.record.layout import Layout
from tinsmith.terminal import new_console


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """No server is named, and none is started: the places of their data folders are noted."""
    places: list[str] = []

    @contextmanager
    def own_server(settings: RunConfig) -> Iterator[tuple[str, str]]:
        places.append(f"{settings.folder} {settings.model.name} {settings.service.engine}")
        yield "http://own", "tml-own"

    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tinsmith.runner.own_server", own_server)
    return places


def opened(target: str | Path, *overrides: str, url: str | None = None, key: str | None = None, **choices: str):
    console, server, choice = new_console(quiet=True), SamplingServer(url=url, key=key), CheckpointChoice(**choices)
    with ExitStack() as stack:
        return open_weights(stack, str(target), overrides, Path("new"), console, server=server, choice=choice)


def of(run: Any) -> ServedWeights:
    return ServedWeights(url="http://own", key="tml-own", base="toy", settings=run.settings, run=run)


def test_base_model_has_a_service_of_its_own(no_server: list[str]) -> None:
    weights = opened("toy", "service.engine=fake")
    assert (weights.url, weights.key, weights.name, no_server) == ("http://own", "tml-own", "toy", ["new toy fake"])


def test_run_is_opened_where_its_weights_are(
    tmp_path: Path, no_server: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="on the server that it used"):
        opened(tmp_path / "run")
    monkeypatch.setenv("TINKER_BASE_URL", "http://other")
    monkeypatch.setenv("TINKER_API_KEY", "tml-other")
    weights = opened(tmp_path / "run", checkpoint="best")
    assert (weights.url, weights.key, weights.name, weights.step) == (
        "http://other",
        "tml-other",
        "tinker://r/weights/4",
        4,
    )
    (Layout(tmp_path / "run").service / "checkpoints").mkdir(parents=True)
    assert opened(tmp_path / "run").url == "http://own"
    assert no_server == [f"{tmp_path / 'run'} hub/toy torch"]
    weights = opened(tmp_path / "run", url="http://third", key="tml-third")
    assert (weights.url, weights.key) == ("http://third", "tml-third")


def test_stage_and_sweep_share_the_service_of_their_folder(tmp_path: Path, no_server: list[str]) -> None:
    write_run(tmp_path / "staged" / "01-sft")
    (tmp_path / "staged" / "stages.json").write_text("{}")
    (Layout(tmp_path / "staged").service / "checkpoints").mkdir(parents=True)
    assert opened(tmp_path / "staged").name == "tinker://r/weights/6"
    assert no_server == [f"{tmp_path / 'staged'} hub/toy torch"]
    assert opened(tmp_path / "staged", stage="sft", checkpoint="2").name == "tinker://r/weights/2"
    with pytest.raises(ConfigError, match=r"has no stage rl\. Its stages: sft"):
        opened(tmp_path / "staged", stage="rl")


def test_run_in_progress_keeps_its_service(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (Layout(tmp_path / "run").service / "checkpoints").mkdir(parents=True)
    with Layout(tmp_path / "run").lock("").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="in progress"):
            opened(tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "options", "error"),
    [
        (("tinker://r/weights/1",), {}, "no server is named"),
        (("toy",), {"checkpoint": "best"}, "--checkpoint selects one of a run"),
        (("toy",), {"key": "tml-x"}, "--key is that of a server"),
        (("toy", "service.engine=fake"), {"url": "http://other"}, "service.engine is not used"),
        ((".",), {}, "neither the folder of a run nor of a model"),
    ],
)
def test_what_names_no_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], options: Any, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=error):
        opened(*words, **options)


def test_folder_of_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="tinsmith import") as refused:
        opened(tmp_path)
    assert f"tinsmith export {tmp_path} --format merged" in str(refused.value)


@pytest.mark.parametrize(
    ("sampling", "parameters"),
    [
        ({}, {}),
        ({"max_tokens": 8, "temperature": 0.5, "top_p": 1.0, "top_k": 3, "stop": None}, {"top_k": 3}),
        ({"stop": ["\n"]}, {"stop": ["\n"], "ignore_eos": True}),
        ({"stop": [2]}, {"stop_token_ids": [2], "ignore_eos": True}),
        ({"stop": []}, {"ignore_eos": True}),
    ],
)
def test_replies_are_sampled_as_in_the_run(tmp_path: Path, sampling: Any, parameters: Any) -> None:
    weights = of(write_run(tmp_path, sampling={"max_total_tokens": 99, "method": None, **sampling}))
    settings = reply_settings(weights)
    assert unused_settings(weights) == ["sampling.max_total_tokens"]
    own = {name: sampling[name] for name in ("max_tokens", "temperature") if name in sampling}
    assert settings.parameters == {**parameters, **own}


def test_chat_template_is_that_of_the_run(tmp_path: Path) -> None:
    values = of(write_run(tmp_path / "a", model={"name": "toy", "chat_template_values": {"think": False}}))
    assert reply_settings(values).parameters == {"chat_template_kwargs": {"think": False}}
    assert not has_own_template(values)
    assert has_own_template(of(write_run(tmp_path / "b", model={"name": "toy", "chat_template": "hermes"})))


@pytest.mark.parametrize(
    ("sections", "prompt"),
    [
        ({"tasks": {"train": {"system": "Add."}, "eval": {"easy": {"system": "Add."}}}}, "Add."),
        ({"demonstrations": {"sources": [{"system": "Be brief."}]}}, "Be brief."),
        ({"tasks": {"train": [{"system": "Add."}, {"system": "Subtract."}]}}, "as sent"),
        ({"tasks": {"train": {"system": "Add.", "system_key": "rules"}}}, "as sent"),
        ({"tasks": {"train": {"type": "addition"}}}, "as sent"),
    ],
)
def test_system_prompt_is_that_of_the_run(tmp_path: Path, sections: Any, prompt: str) -> None:
    file = Layout(tmp_path).rollouts("train", 1)
    file.parent.mkdir(parents=True)
    sent = [{"role": "system", "content": "as sent"}, {"role": "user", "content": "1 + 1"}]
    file.write_text(json.dumps({**record("x"), "messages": sent}) + "\n")
    assert system_prompt(of(write_run(tmp_path, **sections))) == prompt


def test_run_without_a_system_prompt_has_none(tmp_path: Path) -> None:
    assert system_prompt(of(write_run(tmp_path))) == ""
    assert system_prompt(ServedWeights(url="http://own", key="tml-own", base="toy")) == ""
