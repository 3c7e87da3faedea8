"""Runs functions in a process that has the stand-in device."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.engine.device import stand_in as device

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def stand_in() -> Iterator[Run]:
    """Calls a function of a module, `stand_in(function, *args)`, in one process for all tests."""
    if not device.is_available():
        pytest.skip("this torch has no devices in Python")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_begin) as pool:
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()


def _begin() -> None:
    """Before the first function of a process."""
    import torch

    torch.set_num_threads(1)
    device.install()
