"""Words of a sweep become overrides of its runs, under names that are folders."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.errors import ConfigError
from tinsmith.rl.sweep.combinations import combinations


def names(*words: str) -> list[str]:
    return [each.name for each in combinations(words)]


def test_every_combination_is_a_run_with_its_overrides():
    made = combinations(["steps=20", "optimizer.learning_rate=1e-4,3e-4", "seed=0..2"])
    assert len(made) == 6
    assert made[1].overrides == ("steps=20", "optimizer.learning_rate=1e-4", "seed=1")
    assert made[1].name == "learning_rate=1e-4,seed=1"
    assert {each.setting for each in made} == {"learning_rate=1e-4", "learning_rate=3e-4"}


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("a=1,2", ["1", "2"]),
        ("a=0..2,7", ["0", "1", "2", "7"]),
        ("a=-1..1", ["-1", "0", "1"]),
        ("a=[x,y],[z]", ["[x,y]", "[z]"]),
        ("a={b: 1, c: 2},{b: 3}", ["{b: 1, c: 2}", "{b: 3}"]),
        ("a='x, y',z", ["'x, y'", "z"]),
        ('a=["x,y"],null', ['["x,y"]', "null"]),
        ("a=it's,that's", ["it's", "that's"]),
        ("a= 1 , 2", ["1", "2"]),
    ],
)
def test_commas_and_ranges_make_several_values(word, values):
    assert [each.overrides[0].partition("=")[2] for each in combinations([word])] == values


@pytest.mark.parametrize("word", ["steps=5", "stop=[a,b]", "text='a, b'", "stop=['0..2']"])
def test_one_value_stays_as_it_is(word):
    assert combinations([word, "seed=1,2"])[0].overrides[0] == word


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["steps=20"], "needs a setting with several values"),
        (["seed=2..0"], "Write the smaller number first: 0..2"),
        (["seed=0..5000"], "more than 1,000"),
        (["seed=0..99", "model.rank=1..99"], "9,900 runs"),
        (["a=1,,2"], "empty value"),
        (["a=1,2,1"], "value 1 twice"),
        (["a=1,2", "a=3,4"], "several values twice"),
        (["folder=runs/a", "seed=0,1"], "cannot set folder: .* --out"),
        (["name=a,b"], "cannot vary name"),
        (["service.engine=torch,fake"], "cannot vary service"),
        (["model.base_url=http://a,http://b"], "cannot vary model.base_url: set --server"),
        (["resume=false", "seed=0,1"], "cannot set resume"),
    ],
)
def test_words_that_make_no_sweep_are_refused(words, error):
    with pytest.raises(ConfigError) as raised:
        combinations(words)
    assert re.search(error, str(raised.value))


def test_keys_with_one_last_part_keep_their_paths():
    assert names("a.rank=1,2", "b.rank=3,4")[0] == "a.rank=1,b.rank=3"


@settings(max_examples=30)
@given(
    st.lists(
        st.text(st.characters(exclude_characters=",'\"[](){}\x00", codec="utf-8"), min_size=1), min_size=2, unique=True
    )
)
def test_names_of_different_values_are_different_folders(values):
    texts = [value.strip() for value in values]
    if "" in texts or len(set(texts)) < len(texts) or any(".." in text for text in texts):
        return
    made = names("key=" + ",".join(values))
    assert len(set(made)) == len(values)
    assert all(len(name) < 200 and "/" not in name and name not in (".", "..") for name in made)
