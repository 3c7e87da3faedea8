"""The choice of what computes the products and the softmax of the output head."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from tinsmith.engine.cpu.instructions import panel_kind
from tinsmith.engine.lora.head.products import Addition, CompiledProducts, Float32Products, HeadProducts, MixedProducts
from tinsmith.engine.lora.head.softmax import SoftmaxOfRows, softmax_of_rows
from tinsmith.engine.triton_support import runs_triton

log = logging.getLogger(__name__)


def products_of(weight: Tensor, bias: Tensor | None) -> HeadProducts:
    """The fastest for weights [V, D] and a float32 bias [V] that work on their device."""
    if weight.device.type != "cpu" and weight.dtype != torch.float32:
        return MixedProducts(weight, bias)
    compiled = _compiled(weight, bias)
    if compiled is None and weight.dtype != torch.float32:
        return Float32Products(weight, bias, few=_compiled(weight.float(), bias))
    return compiled or Float32Products(weight, bias)


def _compiled(weight: Tensor, bias: Tensor | None) -> CompiledProducts | None:
    """Compiled products, where they are the fastest and right."""
    if panel_kind(weight.device, weight.dtype) is None or weight.shape[1] % 8:
        return None
    try:
        check_products(weight.dtype)
        return CompiledProducts(weight, bias)
    except Exception:
        log.warning("The compiled products of the output head do not work here; all is slower without them.",
                    exc_info=True)  # fmt: skip
        return None


def check_products(dtype: torch.dtype) -> None:
    """Raises ValueError unless compiled products are right."""
    draw = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(shape, generator=draw).bfloat16().to(dtype) for shape in ((45, 40), (13, 40)))
    addition = Addition(2, 12, torch.randn(3, 40, generator=draw), torch.randn(45, 3, generator=draw), 0.5)
    actual, wanted = CompiledProducts(weight, None)(hidden, [addition]), hidden.double() @ weight.double().T
    wanted[2:12] += 0.5 * hidden[2:12].double() @ addition.a.double().T @ addition.b.double().T
    if not torch.allclose(actual.double(), wanted, rtol=1e-5, atol=1e-4):
        raise ValueError("products differ from PyTorch's")


def softmax_on(device: torch.device) -> SoftmaxOfRows:
    """The fastest that works on this device."""
    if not runs_triton(device):
        return softmax_of_rows
    try:
        from tinsmith.engine.lora.head import softmax_kernel  # Triton is where GPUs are

        check(softmax_kernel.softmax_of_rows, device)
    except Exception:
        log.warning("The kernel of the output head does not work here; training is slower without it.", exc_info=True)
        return softmax_of_rows
    return softmax_kernel.softmax_of_rows


def check(candidate: SoftmaxOfRows, device: torch.device) -> None:
    """Raises ValueError unless the candidate gives the results of PyTorch's operators."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5001, generator=draw) * torch.tensor([0.1, 3.0, 40.0])[:, None]
    expected = softmax_of_rows(logits.clone(), entropies=True, probs=torch.float32)
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        actual = candidate(logits.to(device, copy=True), entropies=True, probs=dtype)
        plain = candidate(logits.to(device, copy=True), entropies=False, probs=None)
        for values, wanted, tolerance in (
            (actual.log_sums, expected.log_sums, 1e-5),
            (plain.log_sums, expected.log_sums, 1e-5),
            (actual.entropies, expected.entropies, 1e-4),
            (actual.probs, expected.probs, near),
        ):
            assert values is not None
            assert wanted is not None
            if not torch.allclose(values.cpu().float(), wanted, rtol=tolerance, atol=tolerance):
                raise ValueError("softmax of rows differs from PyTorch's")
