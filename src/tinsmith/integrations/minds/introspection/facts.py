"""Facts for gradient_prophet: a passage teaches one of them, and probes question it and others.

Held-out facts occur in no training task, neither as the passage nor in a probe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from random import Random
from typing import Any, Literal

FactSet = Literal["world", "invented"]

_HELD_OUT_SHARE = 4
"""One in this many facts of a relation is held out."""
_LEAST = 4
"""Facts of a relation on each side of the split, so that there are others to ask about."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A subject and an object of a relation, such as France and Paris of `capital`."""

    relation: str
    subject: str
    object: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A question about the policy's beliefs, and the answer whose logprob counts.

    Example: Probe(question="What is the capital of France?", answer="Paris", about="same")
    """

    question: str
    answer: str
    about: str
    """How the question relates to the passage, for the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A question with the answer that is taught, right or changed, and probes of what it changes."""

    question: str
    answer: str
    distinct: tuple[Probe, ...]
    """Probes with different questions."""
    contrasts: tuple[Probe, ...]
    """Probes with the questions of others and other answers."""


class Relations:
    """The relations of a set of facts: templates of questions, and the facts of one side of the split."""

    def __init__(self, name: FactSet, *, held_out: bool) -> None:
        text = (files("tinsmith.integrations.minds.introspection") / f"{name}_facts.json").read_text(encoding="utf-8")
        self._templates: Mapping[str, Mapping[str, Any]] = json.loads(text)
        self._facts = {
            relation: _side(name, relation, row["pairs"], held_out) for relation, row in self._templates.items()
        }

    @property
    def facts(self) -> tuple[Fact, ...]:
        """All facts of this side."""
        return tuple(fact for facts in self._facts.values() for fact in facts)

    def passage(self, fact: Fact, random: Random) -> Passage:
        """A passage about a fact, half of the time with the object of another fact in place of its own."""
        second, third = random.sample([other for other in self._facts[fact.relation] if other != fact], 2)
        elsewhere = random.choice([other for other in self.facts if other.relation != fact.relation])
        changed = random.random() < 0.5
        taught, rival = (second.object, fact.object) if changed else (fact.object, second.object)
        again = self._ask(fact, "again")
        return Passage(
            question=self._ask(fact, "question"),
            answer=taught,
            distinct=(
                Probe(question=again, answer=taught, about="same"),
                Probe(question=self._fill(fact.relation, "reverse", taught), answer=fact.subject, about="reverse"),
                Probe(question=self._ask(second, "question"), answer=second.object, about="sibling"),
                Probe(question=self._ask(third, "again"), answer=third.object, about="sibling"),
                Probe(question=self._ask(elsewhere, "question"), answer=elsewhere.object, about="unrelated"),
            ),
            contrasts=(
                Probe(question=again, answer=rival, about="rival"),
                Probe(question=self._ask(third, "question"), answer=taught, about="transfer"),
            ),
        )

    def _ask(self, fact: Fact, template: str) -> str:
        return self._fill(fact.relation, template, fact.subject)

    def _fill(self, relation: str, template: str, name: str) -> str:
        text = str(self._templates[relation][template]).format(name)
        return text[0].upper() + text[1:]


def _side(name: FactSet, relation: str, pairs: Mapping[str, str], held_out: bool) -> Sequence[Fact]:
    facts = [Fact(relation, subject, object_) for subject, object_ in pairs.items()]
    Random(f"{name}/{relation}").shuffle(facts)
    held = max(_LEAST, len(facts) // _HELD_OUT_SHARE)
    return facts[:held] if held_out else facts[held:]
