"""Private interfaces of other packages that no other test guards; docs/code/private-interfaces.md lists all of them."""

from __future__ import annotations

import inspect

import torch
from tinker.lib import internal_client_holder, telemetry
from tinker.lib.internal_client_holder import InternalClientHolder
from transformers import LlamaConfig, PreTrainedModel


def test_torch_says_whether_bfloat16_is_fast() -> None:
    assert isinstance(torch.cpu._is_avx512_bf16_supported(), bool)
    assert isinstance(torch.cpu._is_amx_tile_supported(), bool)
    assert isinstance(torch.cpu._init_amx(), bool)


def test_torch_has_operators_on_lists() -> None:
    lists = [torch.ones(2), torch.ones(3)]
    torch._foreach_add_(lists, [torch.ones(2), torch.ones(3)])
    assert [each.sum().item() for each in lists] == [4, 6]
    torch._foreach_copy_(lists, [torch.full((2,), 5.0), torch.full((3,), 5.0)])
    assert [each.sum().item() for each in lists] == [10, 15]
    torch._foreach_zero_(lists)
    assert [each.sum().item() for each in lists] == [0, 0]


def test_transformers_has_what_models_of_ours_read() -> None:
    config = LlamaConfig()
    config._attn_implementation = "sdpa"
    assert config._attn_implementation == "sdpa"
    for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        assert name in vars(PreTrainedModel)


def test_sdk_submits_through_a_method_that_can_be_replaced() -> None:
    assert inspect.iscoroutinefunction(InternalClientHolder.execute_with_retries)
    assert "await self.execute_with_retries(" in inspect.getsource(internal_client_holder)
    assert "__slots__" not in vars(InternalClientHolder)


def test_sdk_logs_outages_under_the_names_of_its_modules() -> None:
    assert internal_client_holder.logger.name == "tinker.lib.internal_client_holder"
    assert telemetry.logger.name == "tinker.lib.telemetry"
