"""Tasks: no duplicates, disjoint held-out tasks, and the same tasks for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest

import tinsmith.integrations.minds.introspection as package
from tinsmith.integrations.minds.introspection.entropy_intuition import EntropyIntuition
from tinsmith.integrations.minds.introspection.facts import Relations
from tinsmith.integrations.minds.introspection.ghost_trace import GhostTrace, word_list
from tinsmith.integrations.minds.introspection.gradient_prophet import GradientProphet
from tinsmith.integrations.minds.introspection.self_prediction import SelfPrediction
from tinsmith.rl.data.tasks import question_key
from tinsmith.rl.environments.base import EnvironmentOptions

ENVIRONMENTS = [
    GhostTrace(),
    GhostTrace(words="abstract"),
    GradientProphet(size=400),
    GradientProphet(facts="invented", size=200, kinds=("surprise",)),
    SelfPrediction(size=500),
    SelfPrediction(high=7, size=500, large_share=0.0),
    EntropyIntuition(),
]


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda each: each.title)
def test_tasks_are_different_and_reproducible(environment: EnvironmentOptions):
    tasks = environment.tasks()
    assert len({task.id for task in tasks}) == len(tasks) > 20
    assert len({question_key(task.messages) for task in tasks}) == len(tasks)
    assert list(type(environment)(**dict(environment)).tasks()) == list(tasks)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda each: each.title)
def test_other_seeds_give_other_tasks(environment: EnvironmentOptions):
    other = type(environment)(**{**dict(environment), "seed": 1}).tasks()
    assert [task.messages for task in other] != [task.messages for task in environment.tasks()]


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda each: each.title)
def test_held_out_tasks_are_never_trained_on(environment: EnvironmentOptions):
    sampler, held_out = environment.split(0, train=True)
    assert sampler is not None
    trained = {question_key(task.messages) for task in sampler.draw(2 * sampler.size)}
    assert held_out
    assert not trained & {question_key(task.messages) for task in held_out}


@pytest.mark.parametrize("name", ["world", "invented"])
def test_facts_of_held_out_tasks_are_in_no_training_task(name):
    training, held_out = (Relations(name, held_out=side) for side in (False, True))
    names = {fact.subject for fact in training.facts} | {fact.object for fact in training.facts}
    assert len(training.facts) + len(held_out.facts) >= 60
    assert not {(fact.relation, fact.subject) for fact in training.facts} & {
        (fact.relation, fact.subject) for fact in held_out.facts
    }
    if name == "invented":
        assert not names & {fact.subject for fact in held_out.facts}


def test_passages_teach_facts_and_changed_facts():
    tasks = GradientProphet(size=400).tasks()
    in_context = [task for task in tasks if task.extra["kind"] == "in_context"]
    assert len(in_context) == 200
    abouts = {task.extra["about"] for task in in_context}
    assert abouts == {"same", "reverse", "sibling", "unrelated", "rival", "transfer"}
    surprise = [task for task in tasks if task.extra["kind"] == "surprise"]
    assert all(len(set(task.extra["probes"])) == 5 for task in surprise)


def test_word_lists_share_no_word_and_have_compounds():
    common, abstract = word_list("common"), word_list("abstract")
    assert len(set(common)) == len(common) >= 700
    assert not set(common) & set(abstract)
    assert sum(" " in word for word in common) >= 20
    assert all(word == word.strip().lower() and word for word in (*common, *abstract))


def test_large_numbers_are_a_share_of_the_questions():
    tasks = SelfPrediction(size=1000).tasks()
    levels = [task.extra["difficulty"] for task in tasks]
    assert levels.count("large") == 150
    assert set(levels) == {"easy", "medium", "hard", "large"}
    assert not any(task.messages[-1].content == "What is 6 + 5?" for task in SelfPrediction(high=10).tasks())


def test_deterministic_scenarios_allow_only_the_product():
    tasks = EntropyIntuition(scenarios=("deterministic",)).tasks()
    assert all(len(task.extra["allowed"]) == 1 for task in tasks)
    assert max(task.extra["allowed"][0] for task in tasks) == 100


def test_data_files_lie_in_the_package():
    names = {file.name for file in Path(package.__file__).parent.iterdir()}
    assert {"common_words.txt", "abstract_words.txt", "world_facts.json", "invented_facts.json"} <= names
