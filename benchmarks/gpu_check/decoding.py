"""Steps 7 to 9: decoding with one adapter and with several, many tenants in a pass, cached prefixes and trees."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.comparison import timed
from benchmarks.engine_driver import EngineDriver
from benchmarks.gpu_check.device import profile, seconds
from benchmarks.gpu_check.shapes import Size
from benchmarks.gpu_check.step import Values
from benchmarks.workloads import Batch, questions, rows_of, tree
from tinsmith.engine.base import SampleRequest

RANK, TENANT_RANK = 32, 8
MEAN_REPLY, LONGEST_REPLY = 200, 512
COPY_BYTES_PER_S = 2.6e12
"""Of an H100, for the floor of a decoding step: every weight and every key and value is read once."""


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """Rate of decoding, prefill included."""

    tokens_per_s: float
    ms_per_step: float


def one_adapter(size: Size) -> Values:
    """64 and 256 sequences with replies of unequal lengths."""
    ours = size.engine("Qwen3-4B", cache_tokens=size.of(262_144, 8192))
    _with_versions(ours, 1)
    values: dict[str, object] = {"weights_floor_ms": ours.engine.card.weight_bytes / COPY_BYTES_PER_S * 1000}
    for count in (size.of(64, 4), size.of(256, 8)):
        rate = decode_rate(size, ours, ["version-0"], count)
        values[f"tokens_per_s_{count}"] = rate.tokens_per_s
        values[f"ms_per_step_{count}"] = rate.ms_per_step
        values[f"steady_ms_per_step_{count}"] = _steady_ms(size, ours, count)
    few, many = ([length] * size.of(64, 4) for length in (8, 24))
    for lengths in (few, many):  # all graphs are there, so that none is captured in what is counted
        _decode(ours, ["version-0"], len(lengths), lengths)
    short, long = (
        profile(size, lambda each=each: _decode(ours, ["version-0"], len(each), each)) for each in (few, many)
    )
    values["launches_per_step"] = (long.launches - short.launches) / 16
    values["waits_per_step"] = (long.waits - short.waits) / 16
    values["kernels_of_24_steps"] = long.kernels
    ours.close()
    return values


def many_adapters(size: Size) -> Values:
    """Decoding with eight adapters against one; one row of 16 tokens of each of 64 tenants in one pass."""
    ours = size.engine("Qwen3-4B", cache_tokens=size.of(262_144, 8192))
    _with_versions(ours, 8)
    count = size.of(64, 8)
    lengths = [size.of(128, 8)] * count
    alone = seconds(size, lambda: _decode(ours, ["version-0"], count, lengths))
    mixed = seconds(size, lambda: _decode(ours, [f"version-{number}" for number in range(8)], count, lengths))
    tenants = size.of(64, 4)
    for number in range(tenants):
        ours.create(f"tenant-{number}", TENANT_RANK, seed=number)
    short = rows_of(16, tenants)
    passes = [
        Batch(name="", rows=[row], prompts=[8]).as_pass(f"tenant-{number}") for number, row in enumerate(short.rows)
    ]
    values = {
        "eight_adapters_by_one": mixed / alone,
        "eight_adapters_tokens_per_s": sum(lengths) / mixed,
        "tenants_ms": seconds(size, lambda: ours.run(*passes)) * 1000,
        "tenants_launches": profile(size, lambda: ours.run(*passes)).launches,
    }
    ours.close()
    return values


def prefixes(size: Size) -> Values:
    """The second turn of 48 conversations, a group on a long prompt, and a tree of rows that branch at every turn."""
    ours = size.engine("Qwen3-4B", cache_tokens=size.of(262_144, 16_384))
    _with_versions(ours, 1)
    conversations, length = size.of(48, 4), size.of(4096, 128)
    history = questions(conversations, length, seed=1)
    first = timed(lambda: ours.sample(history, "version-0", 1, 1))
    said = questions(conversations, size.of(200, 16), seed=2)
    longer = [np.concatenate(parts) for parts in zip(history, said, strict=True)]
    second = timed(lambda: ours.sample(longer, "version-0", 1, 1))
    again = [np.concatenate(parts) for parts in zip(longer, said, strict=True)]
    third = timed(lambda: ours.sample(again, "version-0", 1, 1))
    group = questions(1, length, seed=3)
    together = timed(lambda: ours.sample(group, "version-0", 16, size.of(64, 4)))
    ours.create("check", RANK)
    batch = tree(leaves=size.of(20, 4), depth=size.of(10, 3), turns=(3, 3) if size.tiny else (24, 26))
    trained = seconds(size, lambda: ours.run(batch.as_pass("check")))
    separate = [Batch(name="", rows=[row], prompts=[batch.prompts[0]]).as_pass("check") for row in batch.rows]
    apart = seconds(size, lambda: [ours.run(each) for each in separate], turns=1)
    ours.close()
    return {
        "first_turn_s": first,
        "second_turn_s": second,
        "third_turn_s": third,
        "new_tokens_share": (second / first) / (size.of(200, 16) / (length + size.of(200, 16))),
        "group_of_16_s": together,
        "tree_tokens_per_s": batch.tokens / trained,
        "tree_ratio_to_separate_rows": apart / trained,
    }


def decode_rate(size: Size, ours: EngineDriver, versions: Sequence[str], count: int) -> DecodeRate:
    """`count` sequences whose lengths are geometric, so that they end at different steps."""
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.geometric(1 / size.of(MEAN_REPLY, 8), count), size.of(LONGEST_REPLY, 24)).tolist()
    took = seconds(size, lambda: _decode(ours, versions, count, lengths), turns=1)
    return DecodeRate(sum(lengths) / took, took / max(lengths) * 1000)


def _steady_ms(size: Size, ours: EngineDriver, count: int) -> float:
    """Milliseconds of a step of `count` sequences: the difference of replies of two lengths, without prefill."""

    def took(length: int) -> float:
        return seconds(size, lambda: _decode(ours, ["version-0"], count, [length] * count), turns=1)

    few, many = size.of(16, 2), size.of(80, 4)
    return (took(many) - took(few)) / (many - few) * 1000


def _decode(ours: EngineDriver, versions: Sequence[str], count: int, lengths: Sequence[int]) -> None:
    prompts = questions(count, 512 if ours.engine.card.context_length > 4096 else 32)

    async def all_of_them() -> None:
        requests = [
            SampleRequest(
                request_id=f"{id(lengths)}-{index}", prompt=prompt, version=versions[index % len(versions)],
                max_tokens=int(length), stop_tokens=(), seed=index,
            )
            for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]  # fmt: skip
        await asyncio.gather(*(ours.engine.sample(request) for request in requests))

    ours.wait(all_of_them())


def _with_versions(ours: EngineDriver, count: int) -> None:
    for number in range(count):
        ours.create(f"policy-{number}", RANK, seed=number)
        ours.capture(f"policy-{number}", f"version-{number}")
