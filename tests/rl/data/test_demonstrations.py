"""Demonstrations: their training rows, and runs that learn from them alone or with rollouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rl.scripted_run import Killed, breaking, rows, run, settings
from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms.updates import units_of_demonstrations
from tinsmith.rl.data.demonstrations import Demonstrations, DemonstrationsConfig
from tinsmith.rl.data.row_sources import Jsonl
from tinsmith.rl.data.sources import Addition
from tinsmith.rl.types import Message, Task
from tinsmith.testing import END, CharacterCodec


def demonstrations(pairs: bool = False, held_out=(), **config) -> Demonstrations:
    """Demonstrations of a config, without the held-out tasks."""
    settings = DemonstrationsConfig.model_validate(config)
    return Demonstrations(settings, settings.load(), {"": tuple(held_out)}, CharacterCodec(), 0, pairs=pairs)


def words(row) -> str:
    """The learned text of a row; `.` marks the end of a reply."""
    return "".join(chr(target) if target != END else "." for target in row.targets[row.mask])


def write(folder: Path, name: str, data: list[dict]) -> str:
    """Write rows to a JSON Lines file and return its path."""
    file = folder / name
    file.write_text("\n".join(map(json.dumps, data)))
    return str(file)


CHAT = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "two"},
]


@pytest.mark.parametrize(("learn", "learned"), [("last", "two."), ("all", "one.two."), ("text", "2?")])
def test_learn_selects_the_last_reply_all_replies_or_the_text(tmp_path, learn, learned):
    path = write(tmp_path, "chats.jsonl", [{"chat": CHAT, "text": "12?"}])
    prompt = "{text}" if learn == "text" else "{chat}"
    row = demonstrations(data={"type": "jsonl", "path": path, "prompt": prompt}, learn=learn).draw(1)[0]
    assert words(row) == learned
    assert row.kind == "expert"
    assert not row.logprobs.any()
    assert len(row.tokens) == len(row.targets) == len(row.mask)


class ForgetfulCodec(CharacterCodec):
    """Leaves out the thoughts of earlier replies, as templates of reasoning models do."""

    def encode_with_loss_mask(self, messages, tools=()):
        earlier = [replace(message, content=message.content.split(")")[-1]) for message in messages[:-1]]
        return super().encode_with_loss_mask([*earlier, messages[-1]], tools)


def test_all_learns_replies_that_later_contexts_change(tmp_path):
    chat = [{**message, "content": f"(hm){message['content']}"} for message in CHAT]
    source = {"type": "jsonl", "path": write(tmp_path, "chats.jsonl", [{"chat": chat}]), "prompt": "{chat}"}
    config = DemonstrationsConfig.model_validate({"data": source, "learn": "all"})
    codec = ForgetfulCodec()
    drawn = Demonstrations(config, config.load(), {"": ()}, codec, 0, pairs=False).draw(1)
    assert [words(row) for row in drawn] == ["(hm)one.", "(hm)two."]
    pair = {"type": "jsonl", "path": write(tmp_path, "pairs.jsonl", [{"good": chat, "bad": chat}]), "answer": ""}
    config = DemonstrationsConfig.model_validate(
        {"data": {**pair, "prompt": "", "chosen": "{good}", "rejected": "{bad}"}, "learn": "all"}
    )
    with pytest.raises(ConfigError, match="takes several training rows"):
        Demonstrations(config, config.load(), {"": ()}, codec, 0, pairs=True).draw(1)


def test_pair_makes_two_adjacent_rows(tmp_path):
    data = [{"question": str(n), "good": f"yes{n}", "bad": f"no{n}"} for n in range(3)]
    source = {
        "type": "jsonl",
        "path": write(tmp_path, "pairs.jsonl", data),
        "chosen": "{good}",
        "rejected": "{bad}",
        "answer": "",
    }
    drawn = demonstrations(pairs=True, data=source, order={"type": "sequential"}).draw(4)
    assert [(row.kind, words(row)) for row in drawn] == [
        (kind, f"{word}{n}.") for n in (0, 1, 2, 0) for kind, word in (("chosen", "yes"), ("rejected", "no"))
    ]
    with pytest.raises(ConfigError, match="has no rejected reply"):
        demonstrations(pairs=True, data={"type": "addition"})
    with pytest.raises(ConfigError, match="is a pair of replies, which this algorithm"):
        demonstrations(data=source)


def test_epoch_has_every_demonstration_not_held_out_once():
    source = Addition(low=1, high=3)
    held_out = source.load()[:2]
    dataset = demonstrations(data=[source, {"type": "addition", "low": 4, "high": 5}], held_out=held_out)
    texts = [words(row) for row in dataset.draw(11)]
    assert dataset.size == 13
    assert sorted(texts) == sorted(f"{a + b}." for a, b in [(1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3),
                                                            (4, 4), (4, 5), (5, 4), (5, 5)])  # fmt: skip
    with pytest.raises(ConfigError, match="nothing to learn from"):
        demonstrations(data=Addition(low=1, high=1), held_out=Addition(low=1, high=1).load()).draw(1)


def test_max_tokens_truncates_rows_and_drops_empty_ones(tmp_path):
    data = [{"question": "long question?", "answer": "no"}, {"question": "q?", "answer": "yes sir"}]
    path = write(tmp_path, "r.jsonl", data)
    drawn = demonstrations(data={"type": "jsonl", "path": path}, max_tokens=5).draw(3)
    assert [words(row) for row in drawn] == ["yes"] * 3


def test_count_per_step_follows_ratio_and_per_step():
    def count(**more):
        return DemonstrationsConfig.model_validate({"data": {"type": "addition"}, **more})

    assert count().count(4, 6, alone=True) == 4
    assert count().count(4, 6, alone=False) == 24
    assert count(ratio=0.2).count(4, 6, alone=False) == 6
    assert count(per_step=5).count(4, 6, alone=False) == 5
    with pytest.raises(ValueError, match="demonstrations have none"):
        count(order={"type": "difficulty"})


def sft_settings(folder: Path, data: Path, **changes):
    """Settings of a run that learns to say yes from demonstrations."""
    path = write(data, "said.jsonl", [{"question": f"{n}?", "answer": "yes", "no": "no"} for n in range(10)])
    source = {"type": "jsonl", "path": path}
    return settings(
        folder,
        **{
            "algorithm": {"type": "sft"},
            "group_size": 8,
            "demonstrations": {"data": source},
            "tasks": {},
            "rewards": [],
            "eval": {},
            "optimizer": {"learning_rate": 2.0},
            **changes,
        },
    )


def test_sft_run_learns_without_rollouts(tmp_path):
    state = run(sft_settings(tmp_path / "run", tmp_path))
    trained = [row for row in rows(tmp_path / "run") if "optim/expert_nll" in row]
    assert (state.step, state.demonstrations_drawn) == (8, 24)
    assert len(trained) == 8
    assert trained[0]["optim/expert_nll"] > 3 * trained[-1]["optim/expert_nll"]
    assert not any(name.startswith(("reward/", "eval/", "rollouts/")) for row in trained for name in row)


def test_sft_run_is_evaluated_with_tasks_and_rewards(tmp_path):
    changes = {
        "tasks": {"eval": {"type": "largest", "size": 4}},
        "rewards": [{"type": "format", "pattern": "yes"}],
        "eval": {"every": 4},
    }
    run(sft_settings(tmp_path / "run", tmp_path, **changes))
    passed = [row["eval/pass@1"] for row in rows(tmp_path / "run") if "eval/pass@1" in row]
    assert passed == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["cpt", "dpo", "kto", "orpo"])
def test_cpt_and_pairs_learn_from_demonstrations(tmp_path, name):
    path = write(tmp_path, "data.jsonl", [{"question": f"{n}?", "answer": "yes", "no": "no"} for n in range(10)])
    change = {"chosen": "{answer}", "rejected": "{no}"} if name != "cpt" else {"prompt": "?yes"}
    data = {"data": {"type": "jsonl", "path": path, **change}, "learn": "last" if name != "cpt" else "text"}
    run(sft_settings(tmp_path / "run", tmp_path, algorithm={"type": name}, demonstrations=data))
    last = rows(tmp_path / "run")[-1]
    if name != "cpt":
        assert last["optim/pairs/accuracy"] == 1.0
        assert last["optim/pairs/margin"] > 0
        assert last["optim/rows"] == (12 if name == "kto" else 6)
    else:
        assert last["optim/rows"] == 3


def test_mismatched_replies_follow_the_prompt_of_the_next_pair(tmp_path):
    path = write(tmp_path, "data.jsonl", [{"question": q, "yes": f"{q}Y", "no": f"{q}N"} for q in ("a", "bb", "ccc")])
    data = {"data": {"type": "jsonl", "path": path, "chosen": "{yes}", "rejected": "{no}"}}
    settings = DemonstrationsConfig.model_validate({**data, "order": {"type": "sequential"}})
    loaded = settings.load()
    drawn = Demonstrations(settings, loaded, {"": ()}, CharacterCodec(), 0, pairs=True, mismatched=True).draw(3)
    plain = demonstrations(pairs=True, **data, order={"type": "sequential"}).draw(3)
    kinds = ["chosen", "rejected", "mismatched", "mismatched"]
    assert [row.kind for row in drawn] == 3 * kinds
    units = units_of_demonstrations(drawn)
    assert [[row.kind for row in unit.rows] for unit in units] == 3 * [kinds]
    for at in range(3):
        chosen, rejected, *mismatched = drawn[4 * at : 4 * at + 4]
        assert [words(row) for row in mismatched] == [words(chosen), words(rejected)]
        after = plain[2 * ((at + 1) % 3)]
        for row in mismatched:
            length = len(after.tokens) - int(after.mask.sum()) + 1
            assert row.tokens[:length].tolist() == after.tokens[:length].tolist()
            assert len(row.tokens) == len(row.targets) == len(row.mask)


LABELLED = [{"prompt": f"{n}?", "completion": "yes" if n % 3 else "no", "label": bool(n % 3)} for n in range(9)]


CHAT_OF_A = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "B"}]


def labelled(folder: Path, data: list[dict], **source) -> dict:
    """Demonstrations of replies with labels."""
    path = write(folder, "labels.jsonl", data)
    keys = {"prompt": "{prompt}", "reply": "{completion}", "label_key": "label", **source}
    return {"data": {"type": "jsonl", "path": path, **keys}, "order": {"type": "sequential"}}


def test_kto_learns_from_single_replies_with_labels(tmp_path):
    data = labelled(tmp_path, LABELLED)
    run(sft_settings(tmp_path / "run", tmp_path, algorithm={"type": "kto"}, demonstrations=data))
    trained = [row for row in rows(tmp_path / "run") if "optim/labels/accuracy" in row]
    assert len(trained) == 8
    assert trained[0]["optim/rows"] == 6
    last = trained[-1]
    assert last["optim/labels/accuracy"] == 1.0
    assert last["optim/labels/desirable"] > last["optim/labels/divergence"] >= 0 > last["optim/labels/undesirable"]


def drawn_with_labels(config: dict, count: int) -> list:
    settings = DemonstrationsConfig.model_validate(config)
    loaded = settings.load()
    codec = CharacterCodec()
    return Demonstrations(settings, loaded, {"": ()}, codec, 0, pairs=True, labels=True, mismatched=True).draw(count)


def test_replies_with_labels_follow_another_prompt(tmp_path):
    data = [
        {"prompt": "a?", "completion": "A", "label": 1},
        {"prompt": CHAT_OF_A[:1], "completion": CHAT_OF_A[1:], "label": "False"},
        {"prompt": "c?", "completion": "C", "label": 0.0},
    ]
    drawn = drawn_with_labels(labelled(tmp_path, data), 3)
    kinds = ["desirable", "mismatched", "undesirable", "mismatched", "undesirable", "mismatched"]
    assert [row.kind for row in drawn] == kinds
    units = units_of_demonstrations(drawn)
    assert [[row.kind for row in unit.rows] for unit in units] == [kinds[at : at + 2] for at in (0, 2, 4)]
    assert [words(row) for row in drawn] == ["A.", "A.", "B.", "B.", "C.", "C."]
    prompts = [bytes(row.tokens[: int(row.mask.argmax()) + 1]).decode("latin1") for row in drawn]
    assert prompts[0] == prompts[2] == prompts[5] != prompts[4]
    assert prompts[1] == prompts[3] == prompts[4]
    with pytest.raises(ConfigError, match="The 2 demonstrations of a step have one prompt"):
        drawn_with_labels(labelled(tmp_path, data[:2]), 2)


def test_kto_reads_pairs_and_labels_of_several_sources(tmp_path):
    path = write(tmp_path, "pairs.jsonl", [{"question": "1?", "yes": "Y", "no": "N"}])
    pairs = {"type": "jsonl", "path": path, "chosen": "{yes}", "rejected": "{no}"}
    config = labelled(tmp_path, LABELLED[:1])
    kinds = [row.kind for row in drawn_with_labels({**config, "data": [pairs, config["data"]]}, 2)]
    assert sorted(kinds) == ["chosen", "mismatched", "mismatched", "mismatched", "rejected", "undesirable"]


@pytest.mark.parametrize(
    ("label", "problem"),
    [("good", "the label 'label' is 'good'"), (None, "is None"), (2, "is 2"), (0.5, "is 0.5"), ([], r"is \[\]")],
)
def test_label_that_says_nothing_is_refused(tmp_path, label, problem):
    data = [LABELLED[0], {**LABELLED[1], "label": label}]
    with pytest.raises(ConfigError, match=problem):
        DemonstrationsConfig.model_validate(labelled(tmp_path, data)).load()
    with pytest.raises(ConfigError, match="has no field 'worth'"):
        DemonstrationsConfig.model_validate(labelled(tmp_path, data, label_key="worth")).load()


@pytest.mark.parametrize(
    ("name", "source", "problem"),
    [
        ("dpo", {}, "is a reply with a label, which this algorithm does not read"),
        ("sft", {}, "is a reply with a label, which this algorithm does not read"),
        ("kto", {"label_key": ""}, "has no rejected reply and no label"),
        ("kto", {"chosen": "{completion}", "rejected": "{prompt}"}, "label_key applies only to single replies"),
    ],
)
def test_labels_and_algorithms_that_do_not_fit_are_refused(tmp_path, name, source, problem):
    changes = {"algorithm": {"type": name}, "demonstrations": labelled(tmp_path, LABELLED, **source)}
    with pytest.raises((ConfigError, ValueError), match=problem):
        run(sft_settings(tmp_path / "run", tmp_path, **changes))


def test_label_key_is_of_demonstrations_alone(tmp_path):
    source = {"type": "jsonl", "path": write(tmp_path, "labels.jsonl", LABELLED), "label_key": "label"}
    with pytest.raises(ValueError, match="label_key applies only to demonstrations"):
        settings(tmp_path, tasks={"train": source})


def test_kto_refuses_a_step_of_one_pair(tmp_path):
    path = write(tmp_path, "data.jsonl", [{"question": "1?", "answer": "yes", "no": "no"}])
    data = {"data": {"type": "jsonl", "path": path, "chosen": "{answer}", "rejected": "{no}"}, "per_step": 1}
    with pytest.raises(ValueError, match="two pairs"):
        sft_settings(tmp_path / "run", tmp_path, algorithm={"type": "kto"}, demonstrations=data)


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_mix_learns_from_rollouts_and_demonstrations(tmp_path, name):
    changes = {
        "algorithm": {"type": name, "kl": {"type": "none", "coef": 0}},
        "group_size": 4,
        "tasks": {"train": {"type": "addition"}, "held_out": 0},
        "rewards": [{"type": "format", "pattern": "yes"}],
        "optimizer": {"learning_rate": 0.5},
    }
    config = sft_settings(tmp_path / "run", tmp_path, **changes)
    assert config.demonstrations is not None
    run(config.model_copy(update={"demonstrations": config.demonstrations.model_copy(update={"ratio": 0.25})}))
    last = [row for row in rows(tmp_path / "run") if "optim/expert_nll" in row][-1]
    assert last["optim/rows"] == 12 + 4
    assert last["optim/mix/expert"] > 0


@pytest.mark.parametrize(("at", "calls"), [("train", 4), ("save", 1), ("save_for_sampling", 0)])
def test_killed_sft_run_resumes_with_equal_metrics(tmp_path, at, calls):
    run(sft_settings(tmp_path / "whole", tmp_path))
    broken = sft_settings(tmp_path / "broken", tmp_path)
    with pytest.raises(Killed):
        run(broken, breaking(tmp_path / "broken", calls=calls, at=at))
    assert run(broken).step == 8
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"demonstrations": None}, "sft trains on demonstrations"),
        ({"algorithm": {"type": "cpt"}}, "cpt trains on plain text"),
        (
            {"algorithm": {"type": "dpo"}, "demonstrations": {"data": {"type": "addition"}, "learn": "text"}},
            "leave out demonstrations",
        ),
        ({"algorithm": {"type": "mix"}, "demonstrations": None}, "tasks.train is missing"),
        ({"algorithm": {"type": "grpo"}, "tasks": {"train": {"type": "addition"}}}, "rewards is missing"),
        (
            {
                "algorithm": {"type": "grpo"},
                "tasks": {"train": {"type": "addition"}},
                "rewards": [{"type": "number"}],
            },
            "demonstrations is not used with grpo",
        ),
        ({"tasks": {"train": {"type": "addition"}}, "eval": {"every": 2}}, "eval needs rewards"),
    ],
)
def test_rejects_settings_that_do_not_fit_demonstrations(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        sft_settings(tmp_path, tmp_path, **changes)


def test_epochs_count_demonstrations_and_read_them_once(tmp_path, monkeypatch):
    reads: list[str] = []
    read = Jsonl.read
    monkeypatch.setattr(Jsonl, "read", lambda source: reads.append(source.path) or read(source))
    assert run(sft_settings(tmp_path / "run", tmp_path, steps=0, epochs=2)).step == 6
    assert reads == [str(tmp_path / "said.jsonl")]


def test_held_out_task_with_reply_prefix_is_recognized():
    task = Addition(low=1, high=1).load()[0]
    begun = Task(id="t", messages=(*task.messages, Message(role="assistant", content="The")), answer="2")
    with pytest.raises(ConfigError, match="nothing to learn from"):
        demonstrations(data=Addition(low=1, high=1), held_out=[begun]).draw(1)


def test_held_out_task_with_other_system_message_is_recognized(tmp_path):
    chats = [[{"role": "system", "content": "Be brief."}, *CHAT[:2]], CHAT[2:]]
    path = write(tmp_path, "chats.jsonl", [{"chat": chat} for chat in chats])
    held_out = [Task(id="t", messages=(Message(role="user", content="1? "),))]
    dataset = demonstrations(data={"type": "jsonl", "path": path, "prompt": "{chat}"}, held_out=held_out)
    assert {words(row) for row in dataset.draw(4)} == {"two."}


@pytest.mark.parametrize(("learn", "drawn"), [("last", {"two."}), ("all", {"three."})])
def test_learned_turns_never_answer_held_out_tasks(tmp_path, learn, drawn):
    chats = [CHAT, [{"role": "user", "content": "3?"}, {"role": "assistant", "content": "three"}]]
    path = write(tmp_path, "chats.jsonl", [{"chat": chat} for chat in chats])
    held_out = [Task(id=question, messages=(Message(role="user", content=question),)) for question in ("1?", "3?")]
    source = {"type": "jsonl", "path": path, "prompt": "{chat}"}
    held_out = held_out if learn == "last" else held_out[:1]
    assert {words(row) for row in demonstrations(data=source, held_out=held_out, learn=learn).draw(3)} == drawn


def test_pairs_never_answer_held_out_tasks(tmp_path):
    data = [{"q": q, "good": "yes", "bad": [{"role": "user", "content": other}, {"role": "assistant", "content": "no"}]}
            for q, other in [("1?", "2?"), ("3?", "3?")]]  # fmt: skip
    path = write(tmp_path, "pairs.jsonl", data)
    source = {"type": "jsonl", "path": path, "prompt": "{q}", "answer": "", "chosen": "{good}", "rejected": "{bad}"}
    held_out = [Task(id="t", messages=(Message(role="user", content="2?"),))]
    rows = demonstrations(pairs=True, data=source, held_out=held_out).draw(2)
    assert all("3?" in "".join(map(chr, row.tokens)) for row in rows)
