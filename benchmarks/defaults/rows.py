"""Rows of the tasks of this folder that are read from files: the same ones each time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from pathlib import Path
from random import Random

WORDS = {
    "animal": "badger beaver camel cobra cow crab crocodile deer dolphin donkey duck eagle elephant falcon ferret fox "
    "frog giraffe goat gorilla hamster hawk hedgehog horse jaguar kangaroo koala leopard lion lizard lobster "
    "monkey moose octopus ostrich otter owl panda parrot penguin pig rabbit raccoon rhinoceros salmon seal "
    "shark sheep snail spider squirrel swan tiger tortoise turkey walrus whale wolf zebra",
    "country": "Albania Algeria Angola Argentina Australia Austria Belgium Bolivia Brazil Bulgaria Cambodia Canada "
    "Chile China Colombia Croatia Cuba Denmark Ecuador Egypt Estonia Ethiopia Finland France Germany Ghana Greece "
    "Hungary Iceland India Indonesia Iran Ireland Italy Jamaica Japan Kenya Laos Latvia Libya Mexico Mongolia "
    "Morocco Nepal Nigeria Norway Pakistan Peru Poland Portugal Romania Senegal Spain Sweden Thailand Tunisia "
    "Uganda Vietnam",
    "fruit": "apple apricot avocado banana blackberry blueberry boysenberry cherry clementine coconut cranberry "
    "currant date durian elderberry fig gooseberry grape grapefruit guava jackfruit kiwi kumquat lemon lime "
    "lychee mandarin mango melon mulberry nectarine orange papaya peach pear persimmon pineapple plum "
    "pomegranate quince raspberry satsuma strawberry tangerine watermelon",
    "instrument": "accordion bagpipes balalaika banjo bassoon bugle castanets cello clarinet cornet cymbals didgeridoo "
    "dulcimer fiddle flute glockenspiel gong guitar harmonica harp harpsichord lute lyre mandolin maracas "
    "marimba oboe ocarina piano piccolo recorder saxophone sitar tambourine timpani triangle trombone trumpet "
    "tuba ukulele viola violin xylophone zither",
    "sport": "archery badminton baseball basketball biathlon bobsleigh bowling boxing canoeing cricket croquet curling "
    "cycling decathlon fencing football golf gymnastics handball hockey judo karate kayaking lacrosse luge "
    "netball polo rowing rugby sailing skateboarding skating skiing snooker snowboarding softball squash sumo "
    "surfing swimming taekwondo tennis triathlon volleyball weightlifting wrestling",
}
NAMES = [
    "Ada", "Ben", "Clara", "David", "Elena", "Felix", "Grace", "Hugo", "Irene", "Jonas", "Karin", "Leo",
    "Maria", "Nina", "Oscar", "Paula", "Rosa", "Simon", "Tara", "Victor",
]  # fmt: skip
CITIES = [
    "Athens", "Berlin", "Cairo", "Dublin", "Geneva", "Helsinki", "Lima", "Lisbon", "Madrid", "Nairobi", "Oslo",
    "Paris", "Prague", "Rome", "Tokyo", "Vienna",
]  # fmt: skip


def write_rows(folder: Path) -> None:
    """Write the files of all tasks to the folder."""
    _write(folder / "kinds.jsonl", _kinds())
    _write(folder / "records.jsonl", _records())
    dates = list(_dates())
    _write(folder / "dates.jsonl", dates[100:])
    _write(folder / "dates-held-out.jsonl", dates[:100])


def _kinds() -> Iterable[Mapping[str, str]]:
    names = [f"{'an' if name[0] in 'aeiou' else 'a'} {name}" for name in WORDS]
    choice = f"{', '.join(names[:-1])} or {names[-1]}"
    for name, words in WORDS.items():
        for word in words.split():
            yield {"question": f"What is {word}: {choice}? Answer with one word.", "answer": name}


def _records() -> Iterable[Mapping[str, str]]:
    random = Random("records")
    for _ in range(1000):
        name, age, city = random.choice(NAMES), random.randint(18, 80), random.choice(CITIES)
        text = random.choice(("{name}, {age}, lives in {city}.", "In {city} lives {name}, aged {age}."))
        sentence = text.format(name=name, age=age, city=city)
        question = f"{sentence} Write this as a JSON object with the keys name, age and city, and nothing else."
        yield {"question": question, "answer": json.dumps({"name": name, "age": age, "city": city})}


def _dates() -> Iterable[Mapping[str, str]]:
    first = date(1900, 1, 1)
    for days in Random("dates").sample(range(45_000), 1000):
        day = first + timedelta(days)
        yield {
            "question": f"Write {day:%B} {day.day}, {day.year} as YYYY-MM-DD.",
            "answer": day.isoformat(),
        }


def _write(file: Path, rows: Iterable[Mapping[str, str]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
