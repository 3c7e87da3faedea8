"""Routing policies in simulated time: hits of the prefix caches, the busiest replica, the slow-down of requests.

64 replicas, 1,000 clients with 8 conversations under one prompt each. The prefix table is the service's own.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.scale.hardware import Hardware
from benchmarks.scale.samplers import BlockCache
from tinsmith.engine.cluster.prefixes import Block, PrefixTable, choose_replica, prompt_blocks

REPLICAS, CLIENTS, CONVERSATIONS = 64, 1000, 8
CACHE_TOKENS = 400_000
ANSWER = 180
HARDWARE = Hardware()
AT_ONCE = 64
"""Answers that a replica decodes at once at the load of the simulation."""
KEY_BLOCKS = 6
"""The hash goes by this many blocks: a system prompt and a beginning of the client's own."""

Policy = Callable[[list[Block], int, dict[int, float]], int]
"""Blocks and length of a prompt and tokens in flight, to a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Result of a policy.

    Example: Routed(policy="prefix table", hits=0.87, most=0.875, busiest=1.13, slow_down=1.04)
    """

    policy: str
    hits: float
    most: float
    busiest: float
    """Tokens of the busiest replica by the mean."""
    slow_down: float
    """99th percentile of a request's time by its time on an idle replica."""


def policies() -> dict[str, Policy]:
    """The policies, without memory of earlier runs."""
    turns, table = itertools.count(), PrefixTable()

    def by_table(blocks: list[Block], length: int, loads: dict[int, float]) -> int:
        chosen = choose_replica(table, blocks, length, loads, ANSWER + length).replica
        table.record(blocks, chosen)
        return chosen

    return {
        "round robin": lambda *_: next(turns) % REPLICAS,
        "least loaded": lambda _blocks, _length, loads: min(loads, key=loads.__getitem__),
        "rendezvous hash": lambda blocks, _length, _loads: max(
            range(REPLICAS), key=lambda replica: hash((blocks[min(KEY_BLOCKS, len(blocks)) - 1][1], replica))
        ),
        "prefix table": by_table,
    }


def run(name: str, policy: Policy, turns: int, seed: int = 1) -> Routed:
    """All conversations under one policy; with several turns, prompts share a system prompt and grow."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 50_000, 200 if turns > 1 else 0).astype(np.int32)
    caches, endless = [BlockCache(CACHE_TOKENS) for _ in range(REPLICAS)], BlockCache(None)
    loads, running = dict.fromkeys(range(REPLICAS), 0.0), [0] * REPLICAS
    served, slow = np.zeros(REPLICAS), []
    tokens = hits = most = 0
    gap = ANSWER * HARDWARE.decode_step(AT_ONCE) / REPLICAS / AT_ONCE
    numbers = itertools.count()
    events: list[tuple[float, int, str, tuple]] = []
    time = 0.0
    for _ in range(CLIENTS):
        prompt = np.concatenate([system, rng.integers(0, 50_000, rng.integers(200, 800)).astype(np.int32)])
        time += float(rng.exponential(gap * CONVERSATIONS * turns))
        for _ in range(CONVERSATIONS):
            start = time + float(rng.exponential(0.05))
            heapq.heappush(events, (start, next(numbers), "ask", (prompt, turns)))
    while events:
        time, _, kind, data = heapq.heappop(events)
        if kind == "end":
            replica, load = data
            loads[replica] -= load
            running[replica] -= 1
            continue
        prompt, left = data
        answer = int(np.clip(rng.lognormal(np.log(ANSWER) - 0.18, 0.6), 1, 2000))
        blocks = prompt_blocks(prompt, None)
        replica = policy(blocks, len(prompt), loads)
        hit = caches[replica].take(blocks)
        tokens, hits, most = tokens + len(prompt), hits + hit, most + endless.take(blocks)
        running[replica] += 1
        prefill_s = (len(prompt) - hit) * HARDWARE.prefill_per_token_s
        idle_s = prefill_s + answer * HARDWARE.decode_step(AT_ONCE)
        seconds = prefill_s + answer * HARDWARE.decode_step(running[replica])
        slow.append(seconds / idle_s)
        served[replica] += answer + (len(prompt) - hit) / 4
        load = len(prompt) + answer
        loads[replica] += load
        heapq.heappush(events, (time + seconds, next(numbers), "end", (replica, load)))
        if left > 1:
            grown = np.concatenate([prompt, rng.integers(0, 50_000, answer + 50).astype(np.int32)])
            heapq.heappush(events, (time + seconds + 0.2, next(numbers), "ask", (grown, left - 1)))
    return Routed(
        policy=name,
        hits=hits / tokens,
        most=most / tokens,
        busiest=float(served.max() / served.mean()),
        slow_down=float(np.percentile(slow, 99)),
    )


def compare(turns: int) -> list[Routed]:
    """All policies on the same load."""
    return [run(name, policy, turns) for name, policy in policies().items()]
