"""Prompts with images: their tokens, the conversations and training rows that extend them, and whole runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from transformers import AutoTokenizer

from tests.rl.scripted_run import run, settings
from tests.rl.workflows.test_workflows import policy as scripted_policy
from tests.vision import END, IMAGE, START, image_tokens, picture, save_vision_model
from tinsmith import read_metrics
from tinsmith.cli.check import check
from tinsmith.errors import ConfigError, Unsupported, UserError
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.chat import Chat
from tinsmith.rl.policy.chat_session import AgentChatRequest, ChatSession
from tinsmith.rl.policy.images import ImageEncoder
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.sdk import as_datum, capabilities
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.policy.trainer import Update
from tinsmith.rl.policy.training_rows import merge_identical_rows, rows_from_trajectory
from tinsmith.rl.run.open import target_logprobs
from tinsmith.rl.run.parts import image_field
from tinsmith.rl.types import EncodedPrompt, Group, Image, Message, Rollout, Task, Trajectory, Turn
from tinsmith.rl.workflows.conversation import Conversation
from tinsmith.runner import takes_images
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded
from tinsmith.testing import CharacterCodec

A, B, LIKE_A = (Image.of(file) for file in (picture(0), picture(1, 64, 48), picture(2)))
SAMPLING = SamplingConfig(max_tokens=5, stop=())
QUESTION = Message(role="user", content="Which is it?", images=((0, A), (6, B)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(Path(tmp_path_factory.mktemp("vision")))


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    return Chat(AutoTokenizer.from_pretrained(folder), images=ImageEncoder.load(str(folder)))


def turn_of(prompt: EncodedPrompt, *tokens: int) -> Turn:
    logprobs = tuple(-0.1 for _ in tokens)
    return Turn(prompt=prompt.tokens, images=prompt.images, tokens=tokens, logprobs=logprobs, text="", stop="stop")


def test_images_have_the_tokens_of_the_image_processor(chat: Chat) -> None:
    prompt = chat.encode([QUESTION])
    counts = [image_tokens(image.file) for image in (A, B)]
    assert [placed.length for placed in prompt.images] == counts
    for placed, image in zip(prompt.images, (A, B), strict=True):
        assert placed.image == image
        assert set(prompt.tokens[placed.start : placed.start + placed.length]) == {IMAGE}
        assert (prompt.tokens[placed.start - 1], prompt.tokens[placed.start + placed.length]) == (START, END)
    assert prompt.tokens.count(IMAGE) == sum(counts)
    assert chat.decode(prompt.tokens).count(chat.decode([IMAGE])) == 2


def test_conversations_with_images_extend_their_first_prompt(chat: Chat) -> None:
    """Fails if images of later messages are placed by their position in the rest alone."""
    first = turn_of(chat.encode([QUESTION]), 7, 8)
    again = Message(role="user", content="And this?", images=((9, LIKE_A),))
    second = chat.encode([QUESTION, first, again])
    assert second.tokens[: len(first.prompt) + 2] == (*first.prompt, 7, 8)
    assert [placed.image for placed in second.images] == [A, B, LIKE_A]
    last = second.images[-1]
    assert second.tokens[last.start - 1 : last.start + last.length + 1] == (START, *[IMAGE] * last.length, END)
    (row,) = rows_from_trajectory(Trajectory(turns=(first, turn_of(second, 9))))
    assert (row.mask.sum(), len(row.images)) == (3, 3)
    datum = as_datum(row, {"weights": row.mask.astype(np.float32)})
    assert datum.model_input.length == len(row.tokens)
    assert [chunk.type for chunk in datum.model_input.chunks].count("image") == 3


def test_stored_batches_hold_the_images(chat: Chat) -> None:
    task = Task(id="a/0", messages=(QUESTION,))
    trajectory = Trajectory(turns=(turn_of(chat.encode([QUESTION]), 7, 8),))
    group = Group(task=task, rollouts=(Rollout(trajectories=(trajectory,)),))
    stored = TypeAdapter(Group)
    assert stored.validate_json(stored.dump_json(group)) == group


def test_rows_with_other_images_are_other_rows(chat: Chat) -> None:
    """LIKE_A has as many tokens as A: the token ids of both prompts are equal."""
    turns = [
        turn_of(chat.encode([Message(role="user", content="?", images=((0, image),))]), 7) for image in (A, LIKE_A, A)
    ]
    assert turns[0].prompt == turns[1].prompt
    rows = [row for turn in turns for row in rows_from_trajectory(Trajectory(turns=(turn,)))]
    assert [row.count for row in merge_identical_rows(rows)] == [2, 1]
    longer = replace(turns[1], prompt=(*turns[0].prompt, 7, 5))
    assert len(rows_from_trajectory(Trajectory(turns=(turns[0], longer)))) == 2


def test_what_takes_no_images_says_so(chat: Chat, folder: Path) -> None:
    text_only = Chat(AutoTokenizer.from_pretrained(folder))
    unserved = Chat(AutoTokenizer.from_pretrained(folder), images=Unsupported("the server takes none"))
    assert not unserved.takes_images
    plain = Message(role="user", content=f"What is {chat.decode([IMAGE])}?")
    for call, says in (
        (lambda: text_only.encode([QUESTION]), "has no image processor"),
        (lambda: unserved.with_template_values({}).encode([QUESTION]), "the server takes none"),
        (lambda: CharacterCodec().encode([QUESTION]), "scripted policy takes no images"),
        (lambda: chat.prompt([QUESTION]), "reads token ids and takes no images"),
        (lambda: chat.encode_with_loss_mask([QUESTION, Message(role="assistant", content="A")]), "take no images"),
    ):
        with pytest.raises(Unsupported, match=says):
            call()
    with pytest.raises(UserError, match="1 placeholder of images for 0 images"):
        chat.encode([plain])
    assert ImageEncoder.load(str(folder / "none")) is None


class _Recording:
    """A snapshot that replies with two tokens, and the codec of a model."""

    def __init__(self, chat: Any) -> None:
        self.chat = chat

    async def sample(self, prompt: EncodedPrompt, **_: Any) -> tuple[Turn, ...]:
        return (replace(turn_of(prompt, 7, 8), text="yes"),)


def test_agents_send_images_as_data_urls(chat: Chat) -> None:
    """Fails if a conversation is known by its text alone: the second one has the same text as the first."""

    def body(image: Image, *more: dict[str, Any]) -> AgentChatRequest:
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image.data}"}}
        message = {"role": "user", "content": [{"type": "text", "text": "See "}, url]}
        return AgentChatRequest(messages=[message, *more])

    async def main() -> ChatSession:
        session = ChatSession(_Recording(chat), SAMPLING, 0)  # type: ignore[arg-type]
        for image in (A, LIKE_A):
            ((_, reply),) = await session.replies(body(image))
            await session.replies(body(image, reply, {"role": "user", "content": "And?"}))
        with pytest.raises(Unsupported, match="fetches no files"):
            await session.replies(
                AgentChatRequest(
                    messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "http://a/b"}]}]
                )
            )
        return session

    session = asyncio.run(main())
    rows = rows_from_trajectory(Trajectory(turns=session.turns))
    assert [[placed.image for placed in row.images] for row in rows] == [[A], [LIKE_A]]
    assert [int(row.mask.sum()) for row in rows] == [4, 4]

    async def text_only() -> None:
        await ChatSession(scripted_policy("yes"), SAMPLING, 0).replies(body(A))

    with pytest.raises(Unsupported, match="a part of type image_url"):
        asyncio.run(text_only())


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    data = tmp_path_factory.mktemp("served")
    with embedded(ServeConfig(models=(f"vl={folder}",), threads=1, dtype="float32", data=data)) as address:
        yield address


def rows_with_images(folder: Path) -> list[dict[str, str]]:
    for number in range(4):
        (folder / f"{number}.png").write_bytes(picture(number))
    return [{"question": "<image> What?", "answer": "a", "image": str(folder / f"{n}.png")} for n in range(4)]


def test_run_with_images_is_refused_before_its_first_rollout(
    tmp_path: Path, tiny_llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the policy's codec when the run starts, and by the model's folder in `tinsmith check`."""
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    data = tmp_path / "pictures.jsonl"
    data.write_text("\n".join(map(json.dumps, rows_with_images(tmp_path))))
    tasks = {"train": {"type": "jsonl", "path": str(data), "images": "image"}, "held_out": 1}
    changes = {"tasks": tasks, "rewards": [{"type": "format", "pattern": "a"}], "steps": 1}
    with pytest.raises(ConfigError, match=r"The task pictures/\d has images. The scripted policy takes no images"):
        run(settings(tmp_path / "run", **changes))
    for model, says in ((tiny_llama, False), (folder, True), ("org/name", None)):
        config = settings(tmp_path / "run", **changes, model={"name": str(model), "rank": 4})
        assert (image_field(config), takes_images(config)) == ("image", says)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    with pytest.raises(ConfigError, match=r"images in their field 'image', and the model .* takes none"):
        check(str(file), f"model.name={tiny_llama}")
    check(str(file), f"model.name={folder}")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_trainer_sees_the_images_that_the_sampler_saw(served: tuple[str, str]) -> None:
    """Fails if a row has its images elsewhere than its prompt had them, or if other models get none."""

    async def main() -> Any:
        assert (await capabilities(*served)).images == {"vl": True}
        policy = await TinkerTrainer.connect(ModelConfig(name="vl", rank=4), *served, seed=1)
        try:
            snapshot = await policy.snapshot()
            conversation = Conversation(snapshot, SAMPLING, 3)
            await conversation.say(QUESTION)
            await conversation.say(Message(role="user", content="And?", images=((0, LIKE_A),)))
            (row,) = rows_from_trajectory(conversation.trajectory)
            placed = (replace(row.images[0], image=LIKE_A), *row.images[1:])
            scored = await policy.logprobs([row, replace(row, images=placed)])
            (reference,) = await target_logprobs(await policy.models.open_model("vl"), [row])
            inputs = {"logprobs": row.logprobs, "advantages": row.mask.astype(np.float32)}
            update = Update(rows=(row,), inputs=(inputs,), loss="importance_sampling")
            result = (await policy.train([update], OptimizerConfig(), 1e-2))[0]
            return row, scored, reference, result.logprobs[0]
        finally:
            await policy.models.close()

    row, (trained, other), reference, updated = asyncio.run(main())
    for logprobs in (trained, reference, updated):
        np.testing.assert_allclose(logprobs[row.mask], row.logprobs[row.mask], atol=1e-4)
    assert np.abs(other - trained)[row.mask].max() > 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_replay_takes_the_experts_of_images(tmp_path: Path) -> None:
    """The records of two turns are those of the row, its images' tokens included."""
    folder = save_vision_model(tmp_path / "model", "qwen3_vl_moe")

    async def main(address: tuple[str, str]) -> Any:
        policy = await TinkerTrainer.connect(ModelConfig(name="vl", rank=4, router_replay="replay"), *address, seed=1)
        try:
            conversation = Conversation(await policy.snapshot(), SAMPLING, 3)
            await conversation.say(QUESTION)
            await conversation.say("And?")
            (row,) = rows_from_trajectory(conversation.trajectory)
            inputs = {"logprobs": row.logprobs, "advantages": row.mask.astype(np.float32)}
            return row, await policy.accumulate(Update(rows=(row,), inputs=(inputs,), loss="importance_sampling"))
        finally:
            await policy.models.close()

    with embedded(ServeConfig(models=(f"vl={folder}",), threads=1, dtype="float32", data=tmp_path / "data")) as address:
        row, result = asyncio.run(main(address))
    assert row.routed_experts is not None
    assert len(row.routed_experts) == len(row.tokens)
    assert row.routed_experts.max() < 4, "every token has a record"
    assert result.metrics["expert_mismatch:mean"] == 0
    assert result.metrics["logprob_mismatch:mean"] < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_runs_train_on_tasks_with_images(served: tuple[str, str], tmp_path: Path) -> None:
    """Images of files, drawn, sampled, rewarded and trained on; a stored batch holds them."""
    config = settings(
        tmp_path / "run",
        model={"name": "vl", "rank": 4},
        tasks={"train": {"type": "rows", "data": rows_with_images(tmp_path), "images": "image"}, "held_out": 1},
        rewards=[{"type": "format", "pattern": ".*[aeiou].*"}],
        sampling={"max_tokens": 4, "stop": []},
        algorithm={"type": "grpo", "kl_penalty": {"coef": 0.1}},
        steps=2,
    )

    async def connect(state: str, version: int) -> TinkerTrainer:
        return await TinkerTrainer.connect(config.model, *served, seed=1, state=state, version=version)

    run(config, connect)
    metrics = read_metrics(tmp_path / "run")
    assert len([row for row in metrics if "reward/mean" in row]) >= 2
    assert not any(row.get("rollouts/failed") for row in metrics)
