"""forward_backward and optim_step on a GRPO batch, with shared and with different prompts, against PEFT.

The baseline pads rows to the right, eight at a time, and shares nothing: both batches have the same lengths, so one run
of it for each turn serves both lines. Tokens are counted as the user counts them, a shared prompt in every row.

The share of the matmul peak takes the useful FLOPs of the shared batch, each packed position once (P: weights of all
projections, r (in + out) those of a projection's adapter, T packed positions, S those with a gradient at the head):

    body       2 P T forward + 2 P T backward to the inputs (no gradient of the base is wanted)
    adapters   3 * 2 r (in + out) T: forward, to the inputs, to the adapter
    attention  12 H D (sum over positions of the keys each sees): two products forward, four backward, in each layer
    head       2 V D T forward + 2 V D S backward; its adapter 2 r (V + D) (T + 2 S)

by the seconds of forward_backward and optim_step. Element-wise work, and what is computed twice, counts as nothing. The
peak is the best rate of any product of the model's own shapes, at a micro-batch's height; measured in the same turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.baseline import Baseline, load
from benchmarks.comparison import Comparison, Line, Setting, in_turns, rotate, timed
from benchmarks.engine_driver import EngineDriver
from benchmarks.workloads import Batch, grpo
from tinsmith.engine.lora import compiled_adapters
from tinsmith.engine.lora.compiled_projections import fit
from tinsmith.engine.lora.linear import LoraLinear
from tinsmith.engine.lora.matmul import FrozenLinear
from tinsmith.engine.model import packing
from tinsmith.engine.model_parts import HEAD

RANK = 32
HEIGHT = 1024
"""Packed tokens of a micro-batch, about."""
PEFT = "transformers + PEFT, padded rows of 8"


def measure(setting: Setting) -> list[Line]:
    """Shared prompts, different prompts, and the share of the peak."""
    shared, different = grpo(), grpo(shared=False)
    ours, theirs = _sides(setting)
    peaks: list[dict[tuple[int, int], float]] = []
    sides = {
        "shared": lambda: _train(ours, shared),
        "theirs": lambda: theirs.train(shared.rows, shared.prompts),
        "different": lambda: _train(ours, different),
        "peak": lambda: peaks.append(peak_rates(ours)),
    }
    seconds = rotate(sides, setting.turns)
    comparison = Comparison(seconds["different"], seconds["theirs"])
    lines = [
        _shared_line(setting, shared, Comparison(seconds["shared"], seconds["theirs"])),
        comparison.line(f"the same with {different.name}", PEFT, 1.8, 2.3, different.tokens),
        share(ours, shared, seconds["shared"], peaks),
    ]
    ours.close()
    return lines


def shared_alone(setting: Setting) -> list[Line]:
    """The line of shared prompts and no other."""
    shared = grpo()
    ours, theirs = _sides(setting)
    comparison = in_turns(
        lambda: _train(ours, shared), lambda: theirs.train(shared.rows, shared.prompts), setting.turns, warm_up=0
    )
    ours.close()
    return [_shared_line(setting, shared, comparison)]


def _sides(setting: Setting) -> tuple[EngineDriver, Baseline]:
    """Both sides, warmed up with a group."""
    ours, theirs, small = EngineDriver(setting), Baseline(load(setting), RANK), grpo(groups=1)
    ours.create("bench", RANK)
    _train(ours, small)
    theirs.train(small.rows, small.prompts)
    return ours, theirs


def _shared_line(setting: Setting, work: Batch, comparison: Comparison) -> Line:
    """The promised ratio, which depends on the dtype."""
    aim = 4.0 if setting.dtype == "float32" else 4.5
    return comparison.line(f"GRPO batch of {work.name}, {setting.dtype}", PEFT, 3.0, aim, work.tokens)


def _train(ours: EngineDriver, work: Batch) -> None:
    ours.run(work.as_pass("bench"))
    ours.step("bench")


def share(ours: EngineDriver, work: Batch, seconds: list[float], peaks: list[dict[tuple[int, int], float]]) -> Line:
    """Share of each turn's peak; the note has the share if every product ran at the best rate of its own shape."""
    flops = useful_flops(ours, work, RANK)
    best = {shape: max(peak[shape] for peak in peaks) for shape in peaks[0]}
    total = sum(weight_flops(ours).values())
    own = total / sum(flops / best[shape] for shape, flops in weight_flops(ours).items())
    rates = [flops / turn_s for turn_s in seconds]
    return Line(
        work="share of the machine's matmul peak that its useful FLOPs reach",
        baseline="best product of the model's shapes",
        unit="%",
        least=50.0,
        aim=65.0,
        values=[100 * rate / max(peak.values()) for rate, peak in zip(rates, peaks, strict=True)],
        ours=f"{statistics.median(rates) / 1e9:,.0f} GFLOP/s",
        theirs=f"{max(best.values()) / 1e9:,.0f} GFLOP/s",
        note=f"{flops / 1e12:.2f} TFLOP; {100 * statistics.median(rates) / own:.0f} % of what the products reach, each "
        f"at the best rate of its own shape ({own / 1e9:,.0f} GFLOP/s)",
    )


def useful_flops(ours: EngineDriver, work: Batch, rank: int) -> float:
    """FLOPs of one forward_backward over `work`, by the formula above."""
    data_pass = work.as_pass("bench")
    tree = packing.pack(
        [packing.PackedRow(key=key, adapter=0, tokens=datum.tokens) for key, datum in enumerate(data_pass.data)]
    )
    packed, seen = len(tree.tokens), float((tree.positions + 1).sum())
    learning = len(
        {int(tree.index[key][at]) for key, d in enumerate(data_pass.data) for at in d.inputs["advantages"].nonzero()[0]}
    )
    shapes = _shapes(ours)
    vocabulary, width = shapes.pop(HEAD)
    config = ours.engine.trainer._base.model.config
    body = sum(height * width for height, width in shapes.values())
    adapters = rank * sum(height + width for height, width in shapes.values())
    heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return (
        4 * body * packed
        + 6 * adapters * packed
        + 12 * heads * seen
        + 2 * vocabulary * width * (packed + learning)
        + 2 * rank * (vocabulary + width) * (packed + 2 * learning)
    )


def weight_flops(ours: EngineDriver) -> Mapping[tuple[int, int], float]:
    """FLOPs by a product's shape (out, in), for one position: each projection as often as there are layers."""
    flops: dict[tuple[int, int], float] = {}
    for height, width in _shapes(ours).values():
        flops[height, width] = flops.get((height, width), 0.0) + 2 * height * width
    return flops


def _shapes(ours: EngineDriver) -> dict[str, tuple[int, int]]:
    """Shapes of all matrices of the base: name -> (out, in)."""
    model = ours.engine.trainer._base.model
    matrices = {path: module.frozen.shape for path, module in model.named_modules() if isinstance(module, LoraLinear)}
    shapes = {path: (int(height), int(width)) for path, (height, width) in matrices.items()}
    head: Any = model.get_output_embeddings()
    return {**shapes, HEAD: (int(head.weight.shape[0]), int(head.weight.shape[1]))}


@torch.no_grad()
def peak_rates(ours: EngineDriver) -> dict[tuple[int, int], float]:
    """FLOP/s of each shape's product at a micro-batch's height, where and as the base is: the best of five, by oneDNN
    or by our compiled function."""
    rates = {}
    device, dtype = torch.device(ours.engine.card.device), getattr(torch, ours.engine.card.dtype)
    compiles = compiled_adapters.work_on(device, dtype)
    for height, width in weight_flops(ours):
        left, right = (torch.randn(rows, width, device=device).bfloat16().to(dtype) for rows in (HEIGHT, height))
        fixed = [FrozenLinear(right).reorder(backward=False)]
        if compiles and fit(right.shape):
            fixed.append(FrozenLinear(right))
            fixed[-1].lay_out()

        def product(form: FrozenLinear, left: torch.Tensor = left) -> None:
            form(left)
            if left.device.type == "cuda":
                torch.cuda.synchronize()

        best = min(timed(partial(product, form)) for _ in range(6) for form in fixed)
        rates[height, width] = 2 * HEIGHT * height * width / best
    return rates
