"""The gated delta rule on a packed tree against its recurrence, token by token, on separate rows."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from tinsmith.engine.model.hybrid.chunk_rule import HeadShape, chunk_rule
from tinsmith.engine.model.hybrid.chunk_tensors import ChunkTensors
from tinsmith.engine.model.hybrid.chunk_tree import chunk_tree, parents_of
from tinsmith.engine.model.hybrid.convolution import convolve, convolve_chunks
from tinsmith.engine.model.hybrid.delta_rule import delta_step
from tinsmith.engine.model.packing import PackedRow, PackedTree, pack

CPU = torch.device("cpu")
KEY_HEADS, VALUE_HEADS, WIDTH = 2, 4, 8
TAPS = 4


def packed(*rows: list[int]) -> PackedTree:
    return pack([PackedRow(key=key, adapter=0, tokens=np.array(row, np.int32)) for key, row in enumerate(rows)])


def forked(shared: int) -> PackedTree:
    """Two rows that fork after `shared` tokens, and a third that forks from the second one token later."""
    stem = list(range(100, 100 + shared))
    return packed([*stem, *range(1, 71)], [*stem, 80, 81, 82], [*stem, 80, 83, 84])


def inputs_for(tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    """query, key, value, decay and beta in float64."""
    draw = torch.Generator().manual_seed(seed)
    heads = [torch.randn(tokens, count, WIDTH, generator=draw, dtype=torch.float64) for count in (2, 2, 4)]
    decay = -torch.rand(tokens, VALUE_HEADS, generator=draw, dtype=torch.float64)
    return *heads, decay, torch.rand(tokens, VALUE_HEADS, generator=draw, dtype=torch.float64)


def tree_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, tree: ChunkTensors, outside: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`chunk_rule` on the tokens [C, heads, width] of a pass."""
    rows = torch.cat([part.flatten(1) for part in (query, key, value)], 1)
    slots = tree.inputs.view(-1, TAPS - 1 + tree.size)[:, TAPS - 1 :]
    return chunk_rule(rows[slots], decay, beta, HeadShape(KEY_HEADS, WIDTH, VALUE_HEADS, WIDTH), tree, outside)


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of one row and its last state, written as the formula."""
    query, key = (heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt() for heads in (query, key))
    query, key = (heads.repeat_interleave(VALUE_HEADS // KEY_HEADS, 1) for heads in (query, key))
    state = torch.zeros(VALUE_HEADS, WIDTH, WIDTH, dtype=query.dtype)
    outputs = []
    for step in range(len(query)):
        state = state * decay[step].exp()[:, None, None]
        error = value[step] - torch.einsum("hkv,hk->hv", state, key[step])
        state = state + torch.einsum("hk,hv->hkv", key[step], beta[step][:, None] * error)
        outputs.append(torch.einsum("hkv,hk->hv", state, query[step]) / WIDTH**0.5)
    return torch.stack(outputs), state


@pytest.mark.parametrize("shared", [0, 1, 2, 3, 63, 64, 65])
def test_forked_rows_equal_separate_rows_forward_and_backward(shared: int) -> None:
    tree = forked(shared)
    inputs = [tensor.requires_grad_() for tensor in inputs_for(len(tree.tokens))]
    weights = inputs_for(len(tree.tokens), seed=1)[2]
    ends = [int(path[-1]) for path in tree.index.values()]
    tensors = ChunkTensors.of(chunk_tree(parents_of(tree), TAPS, ends=ends), CPU)
    output, states = tree_delta_rule(*inputs, tensors, None)
    rows = [recurrence(*(tensor[path] for tensor in inputs)) for path in tree.index.values()]
    for path, state, (expected, expected_state) in zip(tree.index.values(), states, rows, strict=True):
        torch.testing.assert_close(output[path], expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(state, expected_state, rtol=1e-9, atol=1e-11)
    grads = torch.autograd.grad((output * weights).sum() + states.sum(), inputs)
    # A shared token counts once in the packed sum: with each row's first occurrence of it, as here.
    total, seen = sum(state.sum() for _, state in rows), set[int]()
    for path, (expected, _) in zip(tree.index.values(), rows, strict=True):
        new = [step for step, position in enumerate(path.tolist()) if position not in seen]
        seen |= set(path.tolist())
        total = total + (expected[new] * weights[path[new]]).sum()
    for grad, expected in zip(grads, torch.autograd.grad(total, inputs), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-8, atol=1e-10)


def test_branches_of_one_token_and_forks_of_forks() -> None:
    stem = list(range(200, 220))
    rows = [[*stem, 1], [*stem, 2], [*stem, 3, 4], [*stem, 3, 5, 6], [*stem, 3, 5, 7], stem[:9], [9]]
    tree = packed(*rows)
    inputs = inputs_for(len(tree.tokens))
    tensors = ChunkTensors.of(chunk_tree(parents_of(tree), TAPS), CPU)
    output, _ = tree_delta_rule(*inputs, tensors, None)
    for path in tree.index.values():
        expected, _ = recurrence(*(tensor[path] for tensor in inputs))
        torch.testing.assert_close(output[path], expected, rtol=1e-9, atol=1e-11)


def test_shared_prefix_of_16_branches_gets_all_gradients() -> None:
    tree = packed(*([*range(100, 150), branch, *range(30)] for branch in range(16)))
    inputs = [tensor.requires_grad_() for tensor in inputs_for(len(tree.tokens))]
    output, _ = tree_delta_rule(*inputs, ChunkTensors.of(chunk_tree(parents_of(tree), TAPS), CPU), None)
    own = torch.stack([output[path[50:]].sum() for path in tree.index.values()]).sum()
    total = sum(recurrence(*(tensor[path] for tensor in inputs))[0][50:].sum() for path in tree.index.values())
    for grad, expected in zip(torch.autograd.grad(own, inputs), torch.autograd.grad(total, inputs), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("cut", [1, 2, 3, 40, 64])
def test_pass_from_a_saved_state_equals_the_whole_row(cut: int) -> None:
    inputs = inputs_for(100)
    whole = ChunkTensors.of(chunk_tree(np.arange(100) - 1, TAPS, ends=[cut - 1]), CPU)
    expected, states = tree_delta_rule(*inputs, whole, None)
    rest = ChunkTensors.of(chunk_tree(np.arange(100 - cut) - 1, TAPS, starts={0: 0}), CPU)
    output, _ = tree_delta_rule(*(tensor[cut:] for tensor in inputs), rest, states)
    torch.testing.assert_close(output, expected[cut:], rtol=1e-9, atol=1e-11)


def test_single_steps_equal_the_recurrence() -> None:
    inputs = inputs_for(12)
    expected, expected_state = recurrence(*inputs)
    state = torch.zeros(1, VALUE_HEADS, WIDTH, WIDTH, dtype=torch.float64)
    outputs = [delta_step(*(tensor[step][None] for tensor in inputs), state) for step in range(12)]
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(state[0], expected_state, rtol=1e-9, atol=1e-11)


def test_long_row_equals_transformers() -> None:
    inputs = [tensor.float() for tensor in inputs_for(1500)]
    tensors = ChunkTensors.of(chunk_tree(np.arange(1500) - 1, TAPS, ends=[1499]), CPU)
    output, states = tree_delta_rule(*inputs, tensors, None)
    query, key, value, decay, beta = (tensor[None] for tensor in inputs)
    expected, state = torch_chunk_gated_delta_rule(
        query, key, value, decay, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(output, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, state, rtol=1e-4, atol=1e-5)


def test_nan_of_one_row_reaches_no_other_row() -> None:
    tree = packed([1, 2, 3], list(range(10, 90)))
    inputs = inputs_for(len(tree.tokens))
    tensors = ChunkTensors.of(chunk_tree(parents_of(tree), TAPS), CPU)
    expected = tree_delta_rule(*inputs, tensors, None)[0][tree.index[1]]
    for tensor in inputs:
        tensor[tree.index[0]] = float("nan")
    assert torch.equal(tree_delta_rule(*inputs, tensors, None)[0][tree.index[1]], expected)


@pytest.mark.parametrize("saved", [0, 1])
def test_convolution_follows_the_path_of_each_token(saved: int) -> None:
    """With `saved`, the rows continue one whose last inputs were kept."""
    stem = [100, 101]
    tree = packed([*stem, 1, 2, 3, *range(20, 50)], [*stem, 4], [*stem, 1, 5, 6])
    draw = torch.Generator().manual_seed(0)
    raw = torch.randn(len(tree.tokens), 6, generator=draw, dtype=torch.float64, requires_grad=True)
    before = torch.randn(saved * (TAPS - 1), 6, generator=draw, dtype=torch.float64)
    weight, output_grad = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((6, TAPS), raw.shape))
    chunks = chunk_tree(parents_of(tree), TAPS, starts={0: 0} if saved else {})
    tensors = ChunkTensors.of(chunks, CPU)
    output = tensors.collect(convolve_chunks(raw, weight, tensors, before if saved else None))
    table = torch.cat([raw, raw.new_zeros(1, 6), before])
    torch.testing.assert_close(convolve(table, torch.as_tensor(chunks.ancestors), weight), output)
    expected = torch.zeros_like(output)
    for path in tree.index.values():
        row = torch.cat([before, raw[path]]) if saved else torch.nn.functional.pad(raw[path], (0, 0, TAPS - 1, 0))
        alone = torch.nn.functional.silu(torch.conv1d(row.T[None], weight[:, None], groups=6))[0].T
        expected = expected.index_put((torch.as_tensor(path),), alone)
    torch.testing.assert_close(output, expected)
    grads = (torch.autograd.grad((result * output_grad).sum(), raw)[0] for result in (output, expected))
    torch.testing.assert_close(*grads)
