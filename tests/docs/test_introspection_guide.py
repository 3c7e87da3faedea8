"""The guide of the introspection environments: its run files are valid, its numbers are those of the data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tinsmith.integrations.minds.introspection.facts import Relations
from tinsmith.integrations.minds.introspection.ghost_trace import word_list
from tinsmith.rl.config import RunConfig
from tinsmith.settings import read

ROOT = Path(__file__).parents[2]
GUIDE = "".join((ROOT / "docs" / room / "introspection.md").read_text() for room in ("research", "reference"))


def test_examples_of_the_guide_are_valid():
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    configs = [
        RunConfig.model_validate({"model": {"name": "m"}, "steps": 1, **yaml.safe_load(block)}) for block in blocks
    ]
    assert [config.environments[-1].title for config in configs] == ["abstract_words", "deception"]


@pytest.mark.parametrize("name", ["introspection.yaml", "minds/self_prediction_smollm2.yaml"])
def test_example_file_is_valid(name):
    assert read(RunConfig, ROOT / "examples" / name).environments


def test_numbers_of_the_guide_are_those_of_the_data():
    nouns, abstract = word_list("common"), word_list("abstract")
    assert f"{len(nouns)} nouns, {sum(' ' in word for word in nouns)} of them of two words" in GUIDE
    assert f"has {len(abstract)} others" in GUIDE
    world, invented = (
        sum(len(Relations(name, held_out=side).facts) for side in (False, True)) for name in ("world", "invented")
    )
    assert f"{world} of the world" in GUIDE
    assert f"{invented} `invented` ones" in GUIDE
