"""Checkpoints of a run folder by name, and the model card of an exported one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinsmith.errors import ConfigError
from tinsmith.rl.history import RunHistory, data_folder, find_checkpoint
from tinsmith.rl.history.model_card import model_card

HOSTILE = "<script>x</script> `a` | ![i](http://h) \u202e\n# heading"


def write_run(folder: Path, steps: tuple[int, ...] = (2, 4, 6), **settings: Any) -> RunHistory:
    """A run that saved checkpoints after `steps`; held-out reward is best after step 4."""
    (folder / "checkpoints").mkdir(parents=True)
    states = [{"step": step, "path": f"tinker://r/weights/{step}"} for step in steps]
    for state in states:
        (folder / "checkpoints" / f"step-{state['step']:06}.json").write_text(json.dumps(state))
    newest = {**states[-1], "checkpoints": [[state["path"]] for state in states]}
    (folder / "state.json").write_text(json.dumps(newest))
    values = {"name": "sums", "steps": 6, "model": {"name": "hub/toy", "rank": 8}, **settings}
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    rewards = {0: 0.1, 2: 0.2, 4: 0.9, 6: 0.5}
    rows = [{"step": step, "eval/pass@1": 0.0, "eval/reward/mean": reward} for step, reward in rewards.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunHistory.open(folder)


def comparison(**values: Any) -> list[dict[str, Any]]:
    row = {"first": "step 0", "second": "step 6", "source": "all", "measure": "reward", "tasks": 50, "first_mean": 0.1}
    row |= {"second_mean": 0.5, "difference": 0.4, "low": 0.3, "high": 0.5, "p_value": 0.001, **values}
    return [row, {**row, "measure": "pass@1", "second_mean": 0.0}]


@pytest.mark.parametrize(("which", "step"), [("", 6), ("last", 6), ("best", 4), ("2", 2), ("6", 6)])
def test_checkpoint_is_found_by_name(tmp_path: Path, which: str, step: int) -> None:
    checkpoint = find_checkpoint(write_run(tmp_path), which)
    assert (checkpoint.step, checkpoint.path) == (step, f"tinker://r/weights/{step}")


def test_kept_best_is_the_result(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    best = {"step": 3, "value": 1.0, "path": "tinker://r/weights/best", "sampling_path": "tinker://r/sampler_weights/b"}
    (tmp_path / "state.json").write_text(json.dumps({**state, "best": best, "sampling_path": best["sampling_path"]}))
    run = RunHistory.open(tmp_path)
    for which in ("", "best", "3"):
        checkpoint = find_checkpoint(run, which)
        assert (checkpoint.step, checkpoint.path, checkpoint.sampling_path) == (3, best["path"], best["sampling_path"])
    last = find_checkpoint(run, "last")
    assert (last.step, last.sampling_path) == (6, "tinker://r/weights/6")


@pytest.mark.parametrize(
    ("which", "error"),
    [("3", "steps 2, 4, 6"), ("-1", "names no checkpoint"), ("²", "names no"), ("first", "names no")],
)
def test_other_names_are_refused(tmp_path: Path, which: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        find_checkpoint(write_run(tmp_path), which)


def test_damaged_and_deleted_checkpoints_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**state, "checkpoints": state["checkpoints"][1:]}))
    with pytest.raises(ConfigError, match="steps 4, 6"):
        find_checkpoint(RunHistory.open(tmp_path), "2")
    (tmp_path / "state.json").write_text("{")
    (tmp_path / "checkpoints" / "step-000006.json").write_text("[1]")
    assert find_checkpoint(RunHistory.open(tmp_path)).step == 4


def test_stage_has_the_checkpoint_and_its_run_the_data(tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text("{}")
    write_run(tmp_path / "01-sft", steps=(2,))
    write_run(tmp_path / "02-rl")
    (tmp_path / "service" / "checkpoints").mkdir(parents=True)
    checkpoint = find_checkpoint(RunHistory.open(tmp_path))
    assert checkpoint.run.path == tmp_path / "02-rl"
    assert data_folder(checkpoint.run) == tmp_path / "service"


def test_run_without_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: new")
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        find_checkpoint(RunHistory.open(tmp_path))


def test_card_has_figures_of_its_checkpoint_only(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (tmp_path / "comparison.json").write_text(json.dumps(comparison()))
    card = model_card(find_checkpoint(run), library="peft")
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "hub/toy"
    assert "| `reward` | 0.1 | 0.5 | +0.4 (+0.3 to +0.5) | 0.001 | 50 |" in card
    assert "- algorithm: –" in card  # of a damaged run.yaml
    assert "pass@1" not in card  # nothing says what is right
    earlier = model_card(find_checkpoint(run, "4"), library="transformers")
    assert "+0.4" not in earlier
    assert "`eval/reward/mean`: 0.9" in earlier
    (tmp_path / "metrics.jsonl").unlink()
    assert "not evaluated" in model_card(find_checkpoint(run, "4"), library="peft")


@pytest.mark.parametrize("several", [False, True])
def test_card_names_the_sources_of_demonstrations(tmp_path: Path, several: bool) -> None:
    data = {"type": "jsonl", "path": "dates.jsonl"}
    run = write_run(tmp_path, demonstrations={"data": [data] if several else data, "per_step": 4})
    assert "- demonstrations: `jsonl`, `dates.jsonl`\n" in model_card(find_checkpoint(run), library="peft")


def test_hostile_texts_are_code_in_one_line(tmp_path: Path) -> None:
    train = {"type": "jsonl", "path": "/home/me/secret/tasks.jsonl", "split": HOSTILE}
    model = {"name": HOSTILE, "rank": HOSTILE, "load_from": "/home/me/model"}
    run = write_run(
        tmp_path, name=HOSTILE, model=model, tasks={"train": train}, rewards=[{"type": HOSTILE}, 3], workflow="x"
    )
    rows = [*comparison(source=HOSTILE), {"first": "step 0", "second": "step 6", "low": None}]
    (tmp_path / "comparison.json").write_text(json.dumps(rows))
    card = model_card(find_checkpoint(run), library="peft")
    assert "\u202e" not in card
    assert "/home" not in card
    assert "base_model:" not in card
    for line in card.splitlines():
        assert line.count("`") % 2 == 0
        outside = "".join(line.split("`")[::2])
        assert not set(outside) & set("<![")
        assert "heading" not in outside
        if line.startswith("| `"):
            assert line.replace("\\|", "").count("|") == 7
