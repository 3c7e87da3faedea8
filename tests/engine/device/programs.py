"""What the tests of this folder run in the process of the stand-in device: an engine there and one on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tests.engine.data import pass_for
from tests.engine.device import stand_in
from tests.engine.images.conftest import Parts, row_of
from tests.engine.sampling.helpers import sample_request
from tests.vision import END, START, picture
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, PassResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.lora import grouped_adapters
from tinsmith.engine.model import flex_attention, loading
from tinsmith.engine.sampling import sampler
from tinsmith.engine.sampling.paged.attention import attend_gathered
from tinsmith.engine.sampling.paged.step import DecodeStep
from tinsmith.engine.torch_engine import TorchEngine

ADAM = AdamParams(learning_rate=1e-3, eps=1e-3, grad_clip_norm=1.0)
"""With a small eps, steps would make the rounding of small gradients large."""
Numbers = dict[str, list[np.ndarray]]


def engine_on_device(source: Path, **settings: Any) -> TorchEngine:
    """An engine on the stand-in device."""
    with patch.object(loading, "device_of", lambda _: stand_in.install()):
        return engine_on_cpu(source, **settings)


def engine_on_cpu(source: Path, **settings: Any) -> TorchEngine:
    options = {"dtype": "float32", "check_memory": False, "threads": 1, "pass_tokens": 256, "device": "cpu", **settings}
    return TorchEngine(EngineConfig(source=str(source), **options))


def differences(
    source: Path, work: Callable[[TorchEngine], Coroutine[Any, Any, Numbers]], **settings: Any
) -> dict[str, float]:
    """The largest difference between the device's numbers and the CPU's, by the name of a result; relative above 1."""
    actual = asyncio.run(work(engine_on_device(source, **settings)))
    expected = asyncio.run(work(engine_on_cpu(source, **settings)))
    assert actual.keys() == expected.keys()
    return {name: _largest(actual[name], expected[name]) for name in expected}


def _largest(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    assert [array.shape for array in actual] == [array.shape for array in expected]
    pairs = zip(actual, expected, strict=True)
    return max(float((np.abs(left - right) / np.maximum(np.abs(right), 1)).max(initial=0)) for left, right in pairs)


async def train_and_sample(engine: TorchEngine) -> Numbers:
    """Two tenants' passes in one micro-batch, steps, and samples of both versions in one batch."""
    for number in range(2):
        await engine.create(f"m{number}", LoraSpec(rank=4, seed=number, train_mlp=engine.card.path == "fast"))
    numbers: Numbers = {}
    passes = [pass_for("ppo", f"m{number}", seed=number, config={"return_entropy": True}) for number in range(2)]
    results = await _run(engine, passes)
    numbers["logprobs"] = [row for result in results for row in result.logprobs]
    numbers["entropies"] = [row for result in results for row in result.entropies or ()]
    for number in range(2):
        numbers[f"norm {number}"] = [np.array((await engine.step(f"m{number}", ADAM))["grad_norm"])]
        await engine.capture(f"m{number}", f"v{number}")
    requests = [
        sample_request(version="v0", num_samples=2, max_tokens=5, temperature=0.7, top_p=0.9, top_k=40),
        sample_request(version="v1", num_samples=2, max_tokens=5, prompt_logprobs=True, topk_prompt_logprobs=2),
        sample_request(version="v1", max_tokens=3, temperature=0.0, topk_sample_logprobs=3),
    ]
    sampled = await asyncio.gather(*map(engine.sample, requests))
    turn = sample_request([*requests[0].prompt, *sampled[0].sequences[0].tokens, 7, 8, 9], version="v0", max_tokens=2)
    sequences = [sequence for result in (*sampled, await engine.sample(turn)) for sequence in result.sequences]
    numbers["tokens"] = [sequence.tokens for sequence in sequences]
    numbers["sampled logprobs"] = [sequence.logprobs for sequence in sequences]
    return numbers


async def train_and_sample_images(engine: TorchEngine) -> Numbers:
    """A pass over rows with images, and samples after one."""
    before, after = [5, 6, START], [END, 8, 9, 40, 41]
    rows: list[Parts] = [[before, picture(0), after], [before, picture(0), [*after, START], picture(1, 64, 48), [END]]]
    await engine.create("m", LoraSpec(rank=4, seed=0))
    data = []
    for tokens, images in map(row_of, rows):
        learns = np.append(tokens[1:] >= 0, True).astype(np.float32)
        targets = np.append(np.maximum(tokens[1:], 0), 7).astype(np.int64)
        data.append(Datum(tokens=tokens, targets=targets, inputs={"weights": learns}, images=images))
    [result] = await _run(engine, [Pass(model_id="m", data=tuple(data), loss_fn="cross_entropy")])
    norm = (await engine.step("m", ADAM))["grad_norm"]
    await engine.capture("m", "v")
    tokens, images = row_of(rows[0])
    sampled = await engine.sample(sample_request(tokens, images=images, version="v", max_tokens=6))
    return {
        "logprobs": list(result.logprobs),
        "norm": [np.array(norm)],
        "tokens": [sampled.sequences[0].tokens],
        "sampled logprobs": [sampled.sequences[0].logprobs],
    }


async def _run(engine: TorchEngine, passes: Sequence[Pass]) -> list[PassResult]:
    results = []
    for result in await engine.run(passes):
        if not isinstance(result, PassResult):
            raise result
        results.append(result)
    return results


@dataclass(frozen=True)
class Training:
    """Passes of which a micro-batch consists: `tenants` equal ones."""

    lengths: tuple[int, ...]
    tenants: int
    loss_fn: str


def training_counts(source: Path, cases: Sequence[Training], **settings: Any) -> list[stand_in.Counts]:
    """What a micro-batch of each case costs on one engine; attention is FlexAttention's and products of experts are
    grouped, as on a GPU."""

    async def work() -> list[stand_in.Counts]:
        with flex_attention_on_device(), grouped_products_on_device():
            engine = engine_on_device(source, pass_tokens=4096, **settings)
            for number in range(max(case.tenants for case in cases)):
                await engine.create(f"m{number}", LoraSpec(rank=4, seed=number))
            results = []
            for case in cases:
                passes = [
                    pass_for(case.loss_fn, f"m{number}", seed=number, lengths=case.lengths)
                    for number in range(case.tenants)
                ]
                await _run(engine, passes)
                with stand_in.counting() as counts:
                    await _run(engine, passes)
                results.append(counts)
            return results

    return asyncio.run(work())


@dataclass(frozen=True)
class Decoding:
    """Sequences that are decoded together: of `versions` versions, with these settings of their requests."""

    sequences: int
    versions: int
    settings: Mapping[str, Any] = field(default_factory=dict)


def decoding_counts(
    source: Path, cases: Sequence[Decoding], steps: int, dtype: str = "float32"
) -> list[stand_in.Counts]:
    """What `steps` decoding steps of each case cost, on one engine."""

    async def count(engine: TorchEngine, case: Decoding) -> stand_in.Counts:
        totals = []
        for tokens in (4, 4 + steps):
            requests = [
                sample_request(version=f"v{number % case.versions}", max_tokens=tokens, **case.settings)
                for number in range(case.sequences)
            ]
            with stand_in.counting() as counts:
                await asyncio.gather(*map(engine.sample, requests))
            totals.append(counts)
        short, long = totals
        return stand_in.Counts(long.launches - short.launches, long.reads - short.reads, long.uploads - short.uploads)

    async def work() -> list[stand_in.Counts]:
        engine = engine_on_device(source, dtype=dtype)
        for number in range(max(case.versions for case in cases)):
            await engine.create(f"m{number}", LoraSpec(rank=4, seed=number))
            await engine.capture(f"m{number}", f"v{number}")
        return [await count(engine, case) for case in cases]

    with grouped_products_on_device():
        return asyncio.run(work())


def prefill_counts(source: Path, conversations: int) -> stand_in.Counts:
    """What a prefill of the second turns of so many conversations costs."""

    async def work() -> stand_in.Counts:
        prompts, counts = [[*range(5, 45), 50 + number, *range(60, 80)] for number in range(conversations)], None
        with flex_attention_on_device():
            engine = engine_on_device(source, cache_tokens=8192)
            await asyncio.gather(*(engine.sample(sample_request(prompt, max_tokens=2)) for prompt in prompts))
            prefill = engine.sampler.batch._prefill_prompts

            def counted(*jobs: Any) -> Any:
                nonlocal counts
                with stand_in.counting() as counts:
                    return prefill(*jobs)

            with patch.object(type(engine.sampler.batch), "_prefill_prompts", lambda _, *jobs: counted(*jobs)):
                turns = [[*prompt, *range(90, 140)] for prompt in prompts]
                await asyncio.gather(*(engine.sample(sample_request(turn, max_tokens=2)) for turn in turns))
        assert counts is not None
        return counts

    return asyncio.run(work())


def paged_decoding_counts(source: Path, case: Decoding, steps: int) -> tuple[stand_in.Counts, stand_in.Counts, int]:
    """What decoding steps over pages cost, what of it is in the part that becomes a graph, and the number of steps."""
    within, compute, taken = stand_in.Counts(), DecodeStep._compute, 0

    def counted(*args: Any) -> None:
        nonlocal taken
        taken += 1
        with stand_in.counting() as counts:
            compute(*args)
        within.launches += counts.launches
        within.reads += counts.reads
        within.uploads += counts.uploads

    with (
        patch.object(sampler, "page_attention", lambda _: attend_gathered),
        patch.object(DecodeStep, "_compute", counted),
    ):
        (total,) = decoding_counts(source, [case], steps)
        return total, within, taken


@contextmanager
def grouped_products_on_device() -> Iterator[None]:
    """Grouped products of bfloat16 on the stand-in device."""
    with patch.object(grouped_adapters, "has_grouped_products", lambda weights: weights.dtype == torch.bfloat16):
        yield


@contextmanager
def flex_attention_on_device() -> Iterator[None]:
    """FlexAttention on the stand-in device, with a kernel that applies the whole mask."""
    with (
        patch.object(flex_attention, "is_supported", lambda _: True),
        patch.object(flex_attention, "_compiled", lambda: _dense_attention),
    ):
        yield


def _dense_attention(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scale: float, enable_gqa: bool, **_: Any
) -> Tensor:
    queries, keys = (torch.arange(tensor.shape[2], device=query.device) for tensor in (query, key))
    visible = block_mask.mask_mod(0, 0, queries[:, None], keys[None])
    mask = torch.where(visible, 0.0, float("-inf")).to(query.dtype)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
