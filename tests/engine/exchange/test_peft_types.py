"""Every architecture against PEFT: an adapter of all its projections and experts that PEFT made is imported, and its
logprobs and gradients are PEFT's. Slow; the quick types are in test_imported_experts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.architectures import DENSE, MIXTURES, RECURRENT, save_tiny
from tinsmith.engine.base import Datum, Pass, PassResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.exchange.adapters import make_readable
from tinsmith.engine.exchange.forms import EXPERT_NAMES, model_facts
from tinsmith.engine.lora.targets import LinearTarget, targets, unreached
from tinsmith.engine.torch_engine import TorchEngine

pytestmark = pytest.mark.slow

ROWS = torch.randint(3, 512, (2, 15), generator=torch.Generator().manual_seed(5))
TOLERANCE = 1e-3
"""Of the largest value of a gradient: routers and scans amplify rounding."""


CHANGED = {"longcat_flash"}
"""PEFT takes the names of its dense MLPs for its experts, which adapters here do not reach."""


@pytest.mark.parametrize("model_type", [kind for kind in (*DENSE, *MIXTURES, *RECURRENT) if kind not in CHANGED])
def test_adapter_of_peft_is_the_same_here(model_type: str, wait: Any, tmp_path: Path):
    base = save_tiny(model_type, tmp_path / "base")
    with warnings.catch_warnings(action="ignore"):
        model = write_adapter(load(base), tmp_path / "peft").eval()
    positions = torch.arange(14).expand(2, -1)
    logits = model(input_ids=ROWS[:, :-1], position_ids=positions, use_cache=False).logits
    expected = logits.log_softmax(-1).gather(2, ROWS[:, 1:, None])[..., 0]
    (-expected.sum()).backward()
    make_readable(tmp_path / "peft", tmp_path / "in")
    engine = TorchEngine(EngineConfig(source=str(base), device="cpu", dtype="float32", threads=1))
    wait(engine.fork("m", tmp_path / "in", optimizer=False))
    data = tuple(
        Datum(tokens=row[:-1].int().numpy(), targets=row[1:].numpy(), inputs={"weights": np.ones(14, np.float32)})
        for row in ROWS
    )
    [result] = wait(engine.run([Pass(model_id="m", data=data, loss_fn="cross_entropy")]))
    assert isinstance(result, PassResult), result
    np.testing.assert_allclose(np.stack(result.logprobs), expected.detach().numpy(), atol=3e-4)
    own, compared = engine.trainer.gradients("m"), 0
    for name, parameter in model.named_parameters():
        site, _, matrix = name.removeprefix("base_model.model.").partition(".lora_")
        if parameter.grad is not None and site in own and own[site][0].ndim == 2:
            grad = own[site]["AB".index(matrix[0])]
            bound = TOLERANCE * float(parameter.grad.abs().max()) + 1e-6
            np.testing.assert_allclose(grad, parameter.grad.numpy(), atol=bound, err_msg=name)
            compared += 1
    assert compared >= 4


def load(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()


def write_adapter(plain: Any, folder: Path) -> Any:
    """Write an adapter of everything that adapters reach and PEFT adapts too, with drawn A and B. Returns PEFT's model,
    not loaded again: PEFT does not read its own adapter of laguna back as it was."""
    modules, parameters = [], set[str]()
    family = model_facts(plain, "tiny").family
    of_experts = set(EXPERT_NAMES.get(family, {}).values())  # PEFT takes modules of these names for experts'
    for target in targets(plain):
        if isinstance(target, LinearTarget):
            is_mamba = any(rows.name.endswith(("mixer.x_proj", "mamba.x_proj")) for rows in target.slices)
            interleaves = any(rows.blocks > 1 for rows in target.slices)
            refused = plain.config.model_type in ("falcon_h1", "nemotron_h") and target.name.endswith("out_proj")
            refused |= target.name.rpartition(".")[2] in of_experts
            if not (is_mamba or interleaves or refused):
                modules.append(target.name)
        elif not unreached(plain):
            stack = ".".join(target.name.split(".")[-2:])
            parameters |= {f"{stack}.{'gate_up_proj' if target.has_gate else 'up_proj'}", f"{stack}.down_proj"}
    torch.manual_seed(0)
    model = get_peft_model(
        plain, LoraConfig(r=3, lora_alpha=6, target_modules=modules, target_parameters=sorted(parameters) or None)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.05)
    model.save_pretrained(str(folder))
    return model
