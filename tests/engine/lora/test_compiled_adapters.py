"""Projections and adapters that compiled functions compute against products in float64."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.cpu.processor import each_dtype, needs_panels
from tinsmith.engine.cpu import projections, tiles
from tinsmith.engine.cpu.compiling import Compilation
from tinsmith.engine.load_checks import LoadChecks
from tinsmith.engine.lora import compiled_adapters, compiled_projections
from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair, PlacedAdapter
from tinsmith.engine.lora.adapter_groups import AdapterGroup, AdapterSlice
from tinsmith.engine.lora.compiled_adapters import CompiledAdapters, compiled_groups
from tinsmith.engine.lora.compiled_projections import Panels, ProjectionCall
from tinsmith.engine.lora.linear import ActiveAdapters
from tinsmith.engine.threads.compute import pytorch_threads

pytestmark = needs_panels
SCALE = 0.5
NEAR = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Of the largest result: bfloat16 rounds narrow, its gradient and the results to 1/256 of a number."""


def adapter(rank: int, width: int, outputs: list[int], dtype: torch.dtype, *, trained: bool = True) -> AdapterWeights:
    """Random A and B of projections "0", "1", ... of one input."""
    draw = torch.Generator().manual_seed(0)
    pairs, gradients = dict[str, LoraPair](), dict[str, LoraPair]()
    for number, columns in enumerate(outputs):
        a = torch.randn(rank, width, generator=draw).to(dtype) / 8
        pairs[str(number)] = LoraPair(a, torch.randn(columns, rank, generator=draw).to(dtype) / 8)
        gradients[str(number)] = LoraPair(torch.ones(rank, width), torch.ones(columns, rank))
    return AdapterWeights(SCALE, pairs, gradients if trained else {})


def numbers(rows: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Of bfloat16 values."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16().to(dtype)


def assert_near(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert float((actual.double() - wanted).abs().max() / wanted.abs().max()) < NEAR[dtype]


@each_dtype
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("positions", "rank", "width", "outputs"),
    [
        (1, 16, 32, [32, 64]),
        (64, 16, 32, [32]),
        (65, 8, 64, [32, 96]),
        (130, 24, 96, [64, 32, 32]),
        (201, 32, 64, [96, 32]),
        (77, 40, 32, [64]),
        (90, 16, 64, [32, 64, 32]),
        (31, 7, 96, [32, 64]),
        (70, 33, 64, [64, 32]),
    ],
)
def test_outputs_and_gradients_match_float64(
    dtype: torch.dtype, positions: int, rank: int, width: int, outputs: list[int], count: int
) -> None:
    if dtype == torch.bfloat16 and rank % compiled_adapters.MULTIPLE_RANK:
        pytest.skip("of float32 alone")
    weights, names = adapter(rank, width, outputs, dtype), [str(number) for number in range(len(outputs))]
    start, stop = 3, 3 + positions
    rows, inputs = slice(start, stop), numbers(stop + 2, width, 1, dtype)
    before = [numbers(stop + 2, columns, 2 + columns, dtype) for columns in outputs]
    grads = [numbers(stop + 2, columns, 3 + columns, dtype) for columns in outputs]
    results, input_grad = [each.clone() for each in before], numbers(stop + 2, width, 4, dtype)
    input_grad_before, compiled = input_grad.clone(), CompiledAdapters([(weights, start, stop)])
    with pytorch_threads(count):
        narrow = compiled.forward(inputs, results, names)
        compiled.backward(input_grad, grads, names, inputs, narrow)

    wanted, x = input_grad_before.double(), inputs[rows].double()
    for name, result, own, grad in zip(names, results, before, grads, strict=True):
        a, b, above = weights.pairs[name].a.double(), weights.pairs[name].b.double(), grad[rows].double()
        whole = own.double()
        whole[rows] += SCALE * x @ a.T @ b.T
        assert_near(result, whole, dtype)
        wanted[rows] += SCALE * above @ b @ a
        assert_near(weights.gradients[name].a, 1 + SCALE * (above @ b).T @ x, dtype)
        assert_near(weights.gradients[name].b, 1 + SCALE * above.T @ (x @ a.T), dtype)
    assert_near(input_grad, wanted, dtype)


@each_dtype
def test_results_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    outputs, names = [96, 32], ["0", "1"]
    results = []
    for count in (1, 2):
        weights = adapter(16, 64, outputs, dtype)
        wide, grads = [numbers(300, n, 1, dtype) for n in outputs], [numbers(300, n, 2, dtype) for n in outputs]
        inputs, input_grad, compiled = (
            numbers(300, 64, 3, dtype),
            numbers(300, 64, 4, dtype),
            CompiledAdapters([(weights, 0, 300)]),
        )
        with pytorch_threads(count):
            compiled.backward(input_grad, grads, names, inputs, compiled.forward(inputs, wide, names))
        buffers = [buffer for name in names for buffer in (weights.gradients[name].a, weights.gradients[name].b)]
        results.append([*wide, input_grad, *buffers])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@each_dtype
def test_columns_of_a_wider_output_are_added_to(dtype: torch.dtype) -> None:
    """As of a fused projection, whose slices are views; gradients may have no layout of their own."""
    weights, inputs, wide = (
        adapter(16, 32, [32], dtype, trained=False),
        numbers(80, 32, 1, dtype),
        numbers(80, 96, 2, dtype),
    )
    before, compiled = wide.clone(), CompiledAdapters([(weights, 0, 80)])
    pair = weights.pairs["0"]
    assert compiled.forward(inputs, [wide[:, 32:64]], ["0"]).numel() == 0
    expected = before.double()
    expected[:, 32:64] += SCALE * inputs.double() @ pair.a.double().T @ pair.b.double().T
    assert_near(wide, expected, dtype)
    input_grad, ones = torch.zeros(80, 32, dtype=dtype), torch.ones((), dtype=dtype).expand(80, 32)
    compiled.backward(input_grad, [ones], ["0"], None, None)
    assert_near(input_grad, SCALE * ones.double() @ pair.b.double() @ pair.a.double(), dtype)


@each_dtype
@pytest.mark.parametrize("count", [1, 2])
def test_adapters_of_a_group_are_computed_as_each_alone(dtype: torch.dtype, count: int) -> None:
    """Of several ranks, scales and lengths, one without gradients, and with positions of none between them."""
    outputs, names = [64, 32], ["0", "1"]
    spans = [(2, 90, 16), (90, 91, 8), (100, 300, 32), (301, 303, 24)]
    results = []
    for together in (True, False):
        placed = []
        for start, stop, rank in spans:
            weights = adapter(rank, 64, outputs, dtype, trained=rank != 8)
            weights.scale = rank / 16
            placed.append((weights, start, stop))
        groups = [CompiledAdapters(members) for members in ([placed] if together else [[entry] for entry in placed])]
        inputs, input_grad = numbers(310, 64, 1, dtype), numbers(310, 64, 2, dtype)
        wide, grads = [numbers(310, n, 3, dtype) for n in outputs], [numbers(310, n, 4, dtype) for n in outputs]
        with pytorch_threads(count):
            for group in groups:
                narrow = group.forward(inputs, wide, names)
                group.backward(input_grad, grads, names, inputs, narrow)
        pairs = [each for weights, _, _ in placed for each in weights.gradients.values()]
        results.append([*wide, input_grad, *(buffer for pair in pairs for buffer in (pair.a, pair.b))])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@each_dtype
def test_narrow_alone_is_that_of_forward(dtype: torch.dtype) -> None:
    placed = [(adapter(rank, 64, [32, 96], dtype), start, stop) for rank, start, stop in ((16, 0, 7), (24, 9, 80))]
    group, inputs = CompiledAdapters(placed), numbers(80, 64, 1, dtype)
    narrow = group.forward(inputs, [numbers(80, n, 2, dtype) for n in (32, 96)], ["0", "1"])
    torch.testing.assert_close(group.narrow_of(inputs, ["0", "1"]), narrow, rtol=NEAR[dtype], atol=NEAR[dtype])


@each_dtype
def test_ranks_of_whole_blocks_are_grouped_by_modules(dtype: torch.dtype) -> None:
    whole, odd, other = adapter(16, 32, [32], dtype), adapter(12, 32, [32], dtype), adapter(8, 32, [32, 32], dtype)
    placed = [(whole, 0, 1), (odd, 1, 5), (other, 5, 9), (adapter(24, 32, [32], dtype), 9, 10)]
    groups, others = compiled_groups(placed)
    assert [group.has("1") for group in groups] == [False, True]
    left = [] if dtype == torch.float32 else [placed[1]]  # those of float32 have any rank
    assert others == left
    kinds = {True: ["CompiledAdapters"] * 2 + ["AdapterSlice"] * len(left), False: ["AdapterSlice"] * 4}
    for compiled, names in kinds.items():
        active = ActiveAdapters(compiled=compiled)
        with active.using(placed):
            assert [type(group).__name__ for group in active.groups] == names


@each_dtype
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("positions", "width", "outputs"), [(1, 64, [96, 32]), (77, 32, [64]), (300, 1024, [64, 32])])
def test_projections_under_adapters_match_float64(
    dtype: torch.dtype, positions: int, width: int, outputs: list[int], count: int
) -> None:
    """In one call with the frozen matrices, whose sums are rounded once; adapters of other ranks come after it."""
    names, matrices = [str(number) for number in range(len(outputs))], [numbers(n, width, n, dtype) for n in outputs]
    bias = numbers(1, outputs[0], 9, dtype)[0]
    panels = [Panels.of(matrix, None if number else bias) for number, matrix in enumerate(matrices)]
    spans = [(0, positions - positions // 3, 12), (positions - positions // 3, positions, 16)]
    placed = [(adapter(rank, width, outputs, dtype), start, stop) for start, stop, rank in spans]
    groups: list[AdapterGroup] = [AdapterSlice(*placed[0]), CompiledAdapters(placed[1:])]
    inputs, grads = numbers(positions, width, 1, dtype), [numbers(positions, n, 2 + n, dtype) for n in outputs]
    with pytorch_threads(count):
        results, narrow = compiled_adapters.project(inputs, panels, groups, names)
        input_grad = compiled_adapters.project_back(grads, panels, groups, names, inputs, narrow)

    wanted = torch.zeros(positions, width, dtype=torch.float64)
    for number, (name, result, matrix, grad) in enumerate(zip(names, results, matrices, grads, strict=True)):
        whole = inputs.double() @ matrix.double().T + (0 if number else bias.double())
        wanted += grad.double() @ matrix.double()
        for weights, start, stop in placed:
            a, b, rows = weights.pairs[name].a.double(), weights.pairs[name].b.double(), slice(start, stop)
            above, x = grad[rows].double(), inputs[rows].double()
            whole[rows] += SCALE * x @ a.T @ b.T
            wanted[rows] += SCALE * above @ b @ a
            assert_near(weights.gradients[name].a, 1 + SCALE * (above @ b).T @ x, dtype)
            assert_near(weights.gradients[name].b, 1 + SCALE * above.T @ (x @ a.T), dtype)
        assert_near(result, whole, dtype)
    assert_near(input_grad, wanted, dtype)


@each_dtype
def test_what_a_row_gives_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    """Nor on threads: a sampler computes few rows, and the trainer hundreds."""
    inputs, matrices, names = numbers(500, 1024, 1, dtype), [numbers(n, 1024, n, dtype) for n in (96, 32)], ["0", "1"]
    grads, weights = [numbers(500, n, 2, dtype) for n in (96, 32)], adapter(16, 1024, [96, 32], dtype)
    panels, results = [Panels.of(matrix, None) for matrix in matrices], []
    for count, size in ((1, 500), (2, 500), (2, 1), (1, 65)):
        parts = []
        for start in range(0, 500, size):
            rows = slice(start, min(start + size, 500))
            groups = [CompiledAdapters([(weights, 0, rows.stop - start)])]
            with pytorch_threads(count):
                outputs, narrow = compiled_adapters.project(inputs[rows], panels, groups, names)
                own = [grad[rows] for grad in grads]
                parts.append([*outputs, compiled_adapters.project_back(own, panels, groups, names, None, narrow)])
        results.append([torch.cat(tensors) for tensors in zip(*parts, strict=True)])
    assert all(torch.equal(left, right) for other in results[1:] for left, right in zip(results[0], other, strict=True))


@each_dtype
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("positions", [1, 70])
@pytest.mark.parametrize("rank", [8, 16, 24, 32, 40])
def test_matrices_that_are_not_trained_are_laid_out_once(
    dtype: torch.dtype, rank: int, positions: int, count: int
) -> None:
    """And give the bits of those that each call lays out."""
    names, outputs = ["0", "1", "2"], [32, 96, 64]
    matrices = [Panels.of(numbers(n, 64, n, dtype)) for n in outputs]
    laid_out, trained = (adapter(rank, 64, outputs, dtype, trained=trained) for trained in (False, True))
    inputs, results = numbers(positions, 64, 1, dtype), []
    with pytorch_threads(count):
        for weights in (trained, laid_out, laid_out):
            group = CompiledAdapters([(weights, 0, positions)])
            results.append(compiled_adapters.project(inputs, matrices, [group], names)[0])
    assert all(torch.equal(left, right) for other in results[1:] for left, right in zip(results[0], other, strict=True))
    assert list(laid_out.panels) == ["0"]
    assert not trained.panels


@each_dtype
def test_groups_of_repeated_passes_are_used_again(dtype: torch.dtype) -> None:
    left, right = (adapter(16, 32, [32], dtype, trained=False) for _ in range(2))
    active, two, alone = ActiveAdapters(compiled=True), [(left, 0, 3), (right, 3, 4)], [(left, 0, 4)]

    def groups_of(placed: list[PlacedAdapter], *, repeats: bool) -> AdapterGroup:
        with active.using(placed, repeats=repeats):
            (group,) = active.groups
        return group

    first = groups_of(two, repeats=True)
    assert groups_of(list(two), repeats=True) is first
    second = groups_of(alone, repeats=True)
    assert groups_of(alone, repeats=False) is second
    assert groups_of(alone, repeats=True) is not second
    active.release_memory()
    assert groups_of(two, repeats=True) is not first


def test_sizes_are_those_of_the_compiled_functions() -> None:
    assert compiled_projections.MULTIPLE_WIDTH % tiles.TILE_COLUMNS == 0
    for rank in (8, 16, 24, 32, 40):
        assert compiled_projections.narrow_line(3, rank) == projections.line_of.py_func(3, rank)


@each_dtype
def test_other_widths_are_not_compiled(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    assert compiled_adapters.work_on(cpu, dtype, [32, 576])
    assert not compiled_adapters.work_on(cpu, dtype, [32, 40])
    assert not compiled_adapters.work_on(cpu, torch.float16, [32])


@each_dtype
def test_wrong_results_are_not_used(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ProjectionCall, "fill_outputs", lambda *_, **__: None)
    with caplog.at_level(logging.WARNING):
        assert not compiled_adapters.work_on(torch.device("cpu"), dtype, [32])
    assert "compiled adapters do not work here" in caplog.text


@each_dtype
def test_gradients_are_checked_once_they_are_compiled(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilation = Compilation()
    monkeypatch.setattr(Compilation, "compiles_gradients", True)
    monkeypatch.setattr(ProjectionCall, "add_gradients", lambda *_: None)
    checks = LoadChecks(tmp_path / "checks.json", compilation)
    for _ in range(2):
        assert compiled_adapters.work_on(torch.device("cpu"), dtype, [32], checks)
    assert checks.compilation is compilation
    with pytest.raises(SystemExit):
        checks.finish()
    assert checks.compilation is None
    assert not compiled_adapters.work_on(torch.device("cpu"), dtype, [32], LoadChecks(tmp_path / "checks.json"))
