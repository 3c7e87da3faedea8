"""What the engine makes of each architecture: its path, what adapters reach, and the error against transformers.

For each type that the tests know, a tiny random model is served in float32 on a CPU. Compared with transformers' eager
forward of the same files: the logprobs of two rows that share a prefix, scored in one pass, and 12 greedy tokens. The
rows of types with a vision tower hold an image.

    python -m benchmarks.architectures [TYPE ...]     rewrite benchmarks/results/architectures.json, or rows of it
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests import architectures, vision
from tests.architectures import save_tiny
from tests.engine.images.conftest import row_of
from tinsmith.engine.base import Datum, LoraSpec, Pass, PassResult, SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora import targets
from tinsmith.engine.torch_engine import TorchEngine
from tinsmith.errors import TinsmithError

TYPES = (*architectures.TYPES, *vision.TYPES)
RESULTS = Path(__file__).parent / "results" / "architectures.json"
LENGTH, SHARED, GREEDY = 40, 24, 12
"""Tokens of a row, of the prefix that both rows share, and of the greedy continuation."""


def measure(model_type: str) -> dict[str, Any]:
    """The row of one type. `path` is fast, general or refused; a refused one has a `reason`."""
    if model_type in vision.TYPES:
        return _measure_with_images(model_type)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(model_type, Path(folder))
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        row: dict[str, Any] = {"type": model_type}
        try:
            unreached = targets.unreached(plain)
            names = targets.module_names(targets.targets(plain))
            row |= {"attn": list(names["attn"]), "mlp": [] if unreached else list(names["mlp"])}
            if unreached:
                row["unreached"] = unreached
            engine = TorchEngine(EngineConfig(source=folder, device="cpu", dtype="float32", threads=1))
            row["path"] = engine.card.path
            if engine.card.path == "general":
                row["reason"] = _why_general(folder, model_type)
            spec = LoraSpec(rank=4, seed=0, train_mlp=not unreached)
            return {**row, **asyncio.run(_errors(engine, plain, spec))}
        except TinsmithError as error:
            return {**row, "path": "refused", "reason": error.message.replace(folder, "the model").strip()}


def _why_general(folder: str, model_type: str) -> str:
    """Why the fast path does not serve a model."""
    try:
        TorchEngine(EngineConfig(source=folder, device="cpu", dtype="float32", threads=1, path="fast"))
    except TinsmithError as error:
        return error.message.replace(f"{folder} ({model_type}) ", "").replace(folder, "the model").rstrip(".")
    raise AssertionError("the fast path serves it")


async def _errors(engine: TorchEngine, plain: PreTrainedModel, spec: LoraSpec) -> dict[str, Any]:
    """Largest error of a logprob, and whether the greedy tokens agree."""
    draw, length = np.random.default_rng(0), min(LENGTH, engine.card.context_length)
    rows = draw.integers(3, plain.config.vocab_size, (2, length + 1)).astype(np.int32)
    rows[1, :SHARED] = rows[0, :SHARED]
    await engine.create("model", spec)
    weights = {"weights": np.ones(length, np.float32)}
    data = tuple(Datum(tokens=row[:-1], targets=row[1:].astype(np.int64), inputs=weights) for row in rows)
    [result] = await engine.run([Pass(model_id="model", data=data, loss_fn="cross_entropy")])
    if not isinstance(result, PassResult):
        raise result
    expected = _logits(plain, rows[:, :-1]).log_softmax(-1)
    chosen = expected.gather(2, torch.as_tensor(rows[:, 1:], dtype=torch.long)[..., None])[..., 0]
    error = float((torch.as_tensor(np.stack(result.logprobs)) - chosen).abs().max())
    request = SampleRequest(
        request_id="greedy", prompt=rows[0, :SHARED], temperature=0.0, max_tokens=GREEDY, stop_tokens=()
    )
    if length < LENGTH:  # served up to a window only
        return {"logprob_error": float(f"{error:.1e}"), "limit": length}
    [sequence] = (await engine.sample(request)).sequences
    return {"logprob_error": float(f"{error:.1e}"), "greedy": list(sequence.tokens) == _greedy(plain, rows[0, :SHARED])}


def _measure_with_images(model_type: str) -> dict[str, Any]:
    """The row of a type with a vision tower; `images` is its image processor."""
    with tempfile.TemporaryDirectory() as folder:
        vision.save_vision_model(Path(folder), model_type)
        plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        engine = TorchEngine(EngineConfig(source=folder, device="cpu", dtype="float32", threads=1))
        card = engine.card
        names = {part: list(card.adapted_modules[part]) for part in ("attn", "mlp")}
        row = {"type": model_type, **names, "path": card.path, "images": card.images and card.images.processor}
        return {**row, **asyncio.run(_errors_with_images(engine, plain.eval()))}


async def _errors_with_images(engine: TorchEngine, plain: PreTrainedModel) -> dict[str, Any]:
    """Largest error of a logprob of text, and whether the greedy tokens agree."""
    image, other = vision.picture(0), vision.picture(1, 64, 48)
    before, after = [5, 6, vision.START], [vision.END, 8, 9, 40, 41]
    rows = [[before, image, after], [before, image, [*after, vision.START], other, [vision.END, 7]]]
    await engine.create("model", LoraSpec(rank=4, seed=0))
    data = [row_of(row) for row in rows]
    request = [
        Datum(tokens=tokens, targets=np.append(np.maximum(tokens[1:], 0), 7).astype(np.int64),
              inputs={"weights": np.append(tokens[1:] >= 0, True).astype(np.float32)}, images=images)
        for tokens, images in data
    ]  # fmt: skip
    [result] = await engine.run([Pass(model_id="model", data=tuple(request), loss_fn="cross_entropy")])
    if not isinstance(result, PassResult):
        raise result
    error = 0.0
    for row, datum, logprobs in zip(rows, request, result.logprobs, strict=True):
        expected = _logits_with_images(plain, row).log_softmax(-1)
        chosen = expected.gather(1, torch.as_tensor(datum.targets)[:, None])[:, 0]
        gaps = (torch.as_tensor(logprobs) - chosen).abs() * torch.as_tensor(datum.inputs["weights"])
        error = max(error, float(gaps.max()))
    tokens, images = data[0]
    [sequence] = (
        await engine.sample(
            SampleRequest(
                request_id="greedy", prompt=tokens, images=images, temperature=0.0, max_tokens=GREEDY, stop_tokens=()
            )
        )
    ).sequences
    greedy = list[int]()
    for _ in range(GREEDY):
        greedy.append(int(_logits_with_images(plain, [*rows[0], greedy])[-1].argmax()))
    return {"logprob_error": float(f"{error:.1e}"), "greedy": list(sequence.tokens) == greedy}


@torch.no_grad()
def _logits_with_images(model: Any, row: Sequence[list[int] | bytes]) -> torch.Tensor:
    model.model.rope_deltas = None
    return model(**vision.plain_inputs(row)).logits[0].float()


@torch.no_grad()
def _logits(model: PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    ids = torch.as_tensor(tokens, dtype=torch.long)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()


def _greedy(model: PreTrainedModel, prompt: np.ndarray) -> list[int]:
    """The most likely continuation by full forwards, without a cache."""
    tokens = [int(token) for token in prompt]
    for _ in range(GREEDY):
        tokens.append(int(_logits(model, np.array([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def update(types: Iterable[str]) -> None:
    """Measure these types, and keep the rows of others."""
    rows = {row["type"]: row for row in json.loads(RESULTS.read_text())} if RESULTS.is_file() else {}
    for model_type in types:
        try:
            rows[model_type] = measure(model_type)
        except Exception as error:  # noqa: BLE001 - a type that fails is a row that says so
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            rows[model_type] = {"type": model_type, "path": "fails", "reason": reason}
        print(rows[model_type], flush=True)
    ordered = [rows[model_type] for model_type in TYPES if model_type in rows]
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    update(sys.argv[1:] or TYPES)
