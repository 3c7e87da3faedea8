"""Epochs are counted out in steps, and what does not fill a step is left."""

from __future__ import annotations

import pytest

from tests.rl.scripted_run import run, settings
from tinsmith.errors import ConfigError
from tinsmith.rl.run_folder import RunFolder
from tinsmith.rl.train import with_steps


def small(folder, **changes):
    tasks = {"train": {"type": "largest", "size": 25}, "held_out": 5}
    return settings(folder, **{"steps": 0, "tasks": tasks, **changes})


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"), [(1, 0, 6), (2, 0, 13), (0.5, 0, 3), (2, 4, 4), (1, 40, 6), (None, 7, 7)]
)
def test_steps_are_rows_times_epochs_over_the_steps_size(tmp_path, epochs, steps, expected):
    assert with_steps(small(tmp_path, epochs=epochs, steps=steps)).steps == expected


def test_a_run_of_epochs_ends_by_itself(tmp_path):
    assert run(small(tmp_path, epochs=1)).step == 6
    folder = RunFolder.open(tmp_path, small(tmp_path, epochs=1, steps=6).model_dump(mode="json"))
    assert folder.state is not None
    assert folder.state.cursor == 18
    folder.close()


def test_an_end_is_wanted_and_a_whole_step(tmp_path):
    with pytest.raises(ValueError, match="Set steps, or epochs"):
        small(tmp_path)
    with pytest.raises(ConfigError, match="less than one step of 3"):
        with_steps(small(tmp_path, epochs=0.1))
