"""Functions are compiled while a model is read."""

from __future__ import annotations

import threading

import pytest
import torch

from tinsmith.engine.cpu.compiling import compile_ahead
from tinsmith.engine.cpu.instructions import has_pair_products

pytest.importorskip("numba")

from tinsmith.engine.cpu import logits, packed


def test_functions_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[tuple[str, bool]]()
    for name in ("forward_function", "backward_function"):
        monkeypatch.setattr(packed, name, lambda is_float32, name=name: compiled.append((name, is_float32)))
    monkeypatch.setattr(logits, "logits_function", lambda: compiled.append(("logits_function", False)))
    for dtype in (torch.bfloat16, torch.float32):
        compile_ahead(dtype).join()
    names = {
        False: ["forward_function", "backward_function"]
        + ["logits_function"] * has_pair_products(torch.device("cpu"), torch.bfloat16)
    }
    names[True] = ["forward_function", "backward_function"]
    assert compiled == [(name, is_float32) for is_float32 in (False, True) for name in names[is_float32]]


def test_failure_to_compile_ahead_is_left_to_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = list[object]()
    monkeypatch.setattr(threading, "excepthook", failures.append)
    monkeypatch.setattr(packed, "forward_function", lambda _is_float32: 1 / 0)
    compile_ahead(torch.float32).join()
    assert failures == []
