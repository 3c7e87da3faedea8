"""Compiles functions before the model that calls them is there."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch

from tinsmith.engine.cpu.arguments import KINDS
from tinsmith.engine.cpu.instructions import has_pair_products


def compile_ahead(dtype: torch.dtype) -> threading.Thread:
    """Compile the functions for this dtype in the thread that is returned: seconds, where no process has done it
    before. Where they do not compile, their first call says so."""

    def compile_them() -> None:
        with suppress(Exception):
            from tinsmith.engine.cpu import packed

            packed.forward_function(KINDS[dtype] is float)
            packed.backward_function(KINDS[dtype] is float)
            if has_pair_products(torch.device("cpu"), dtype):
                from tinsmith.engine.cpu import adapters, logits

                logits.logits_function()
                logits.backward_function()
                adapters.forward_function()
                adapters.backward_function()
                adapters.gradient_function()

    thread = threading.Thread(target=compile_them, name="compile")
    thread.start()
    return thread
