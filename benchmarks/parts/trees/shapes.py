"""What prefix sharing gives by shape of the tree: `python -m benchmarks.parts.trees.shapes` prints the table.

Counted by the packer, not timed: positions of all rows by the positions that are computed, once if a micro-batch holds
the whole tree, and in micro-batches of 1,024 and 512 tokens. A tree that does not fit is cut into pieces, and positions
that later pieces see are computed forward once more, which is a third of their work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from benchmarks.workloads import Batch, grpo, rows_of, tree
from tinsmith.engine.model import packing

MICRO_BATCHES = (1024, 512)
FORWARD = 1 / 3
"""Part of a position's work that is forward."""


def shapes() -> Mapping[str, Batch]:
    """The shapes of the table."""
    return {
        "64 different prompts of 150 tokens, answers of 40 to 160": grpo(shared=False),
        "8 prompts of 150 tokens x 8 answers of 40 to 160": grpo(),
        "one conversation of 10 turns, a row for each answer": tree(leaves=1, by_turn=True),
        "20 conversations of 10 turns that share nothing, a row for each": rows_of(499, 20),
        "a tree of 20 leaves, depth 10, a row for each leaf": tree(),
        "the same tree, a row for each answer": tree(by_turn=True),
        "a tree of 64 leaves, depth 10, a row for each answer": tree(leaves=64, by_turn=True),
    }


def packed_rows(work: Batch) -> list[packing.PackedRow]:
    """The rows as a pass computes them, sorted for packing."""
    rows = [
        packing.PackedRow(key=key, adapter=0, tokens=row[:-1].astype(np.int32)) for key, row in enumerate(work.rows)
    ]
    return packing.sorted_for_packing(rows)


def sharing(work: Batch, budget: int | None = None) -> float:
    """Positions of all rows by those that are computed, in micro-batches of `budget` tokens or in one."""
    rows = packed_rows(work)
    if budget is None:
        return work.tokens / packing.packed_tokens(rows)
    waiting, computed = deque(rows), 0.0
    while waiting:
        taken, tokens = packing.take_rows(waiting, budget, whole_trees=True)
        pieces = packing.cut(packing.pack(taken), budget) or ()
        computed += tokens + FORWARD * sum(len(piece.own) for piece in pieces if piece.saves)
    return work.tokens / computed


def main() -> None:
    """Print the table."""
    print("| rows | number | tokens | sharing | in micro-batches of 1,024 | of 512 |\n|---|---|---|---|---|---|")
    for name, work in shapes().items():
        shared = [f"{sharing(work, budget):.2f}x" for budget in (None, *MICRO_BATCHES)]
        print(f"| {name} | {len(work.rows)} | {work.tokens:,} | {' | '.join(shared)} |")


if __name__ == "__main__":
    main()
