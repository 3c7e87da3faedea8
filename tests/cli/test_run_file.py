"""`tinsmith check` summarises each kind of run file; commands without a run file are errors."""

from __future__ import annotations

import pytest
import yaml

from tinsmith.cli import run_file
from tinsmith.errors import ConfigError

SMALL = {
    "model": {"name": "tiny"},
    "tasks": {"train": {"type": "addition"}, "held_out": 5},
    "rewards": [{"type": "number"}],
}
TRINITY = {
    "mode": "bench",
    "checkpoint_root_dir": "out",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
    "model": {"model_path": "tiny", "max_prompt_tokens": 64, "max_response_tokens": 16, "tinker": {"enable": True}},
    "buffer": {
        "batch_size": 4,
        "explorer_input": {
            "eval_tasksets": [{"name": "e", "path": "openai/gsm8k", "split": "test"}],
            "default_workflow_type": "math_workflow",
        },
    },
}


FILE_BUFFER = ("buffer={type: file}",)
STAGES = [{"name": "one", "steps": 2}, {"name": "two", "algorithm": {"type": "rloo"}, "epochs": 1}]


@pytest.mark.parametrize(
    ("values", "words", "summary"),
    [
        (SMALL, ("steps=3",), "is valid: grpo on tiny, 3 steps"),
        (SMALL, ("epochs=0.5",), "is valid: grpo on tiny, 0.5 epochs"),
        (SMALL, ("steps=3", "mode=explore", *FILE_BUFFER), "is valid: mode explore, grpo on tiny, 3 steps"),
        (SMALL, ("epochs=2", "mode=train", *FILE_BUFFER), "is valid: mode train, grpo on tiny, 2 epochs"),
        (SMALL, ("mode=bench",), "is valid: comparison of checkpoints on tiny"),
        (TRINITY, (), "a file of Trinity-RFT, is valid: comparison of checkpoints on tiny"),
        ({**SMALL, "stages": STAGES}, (), "is valid: 2 stages on tiny: one (grpo, 2 steps), two (rloo, 1 epoch)"),
    ],
    ids=["steps", "epochs", "explore", "train", "bench", "bench of Trinity", "stages"],
)
def test_check_summarises_the_run(tmp_path, capsys, values, words, summary):
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(values))
    for file, config in (((str(tmp_path / "file.yaml"),), None), ((), tmp_path / "file.yaml")):
        run_file.check(*file, *words, config=config)
        assert capsys.readouterr().out.endswith(f"{summary}\n")


@pytest.mark.parametrize("command", [run_file.check, run_file.show, run_file.convert])
def test_commands_without_a_file_are_errors(command):
    with pytest.raises(ConfigError, match=f"tinsmith .*{command.__name__} needs a run file"):
        command()
