"""Rules by name: the parts of sites, and that the fast path takes only modules that the rules name."""

from __future__ import annotations

import importlib
import os

import pytest

import tinsmith.engine
from tinsmith.engine.model_parts import part_of, part_of_site, parts_of_sites

LAYER = "model.layers.3"


def test_a_name_belongs_to_a_part_by_its_parent_too():
    assert part_of(f"{LAYER}.self_attn.gate_proj") == "attn"
    assert part_of(f"{LAYER}.mlp.gate_proj") == "mlp"
    assert part_of("transformer.h.0.attn.c_proj") == "attn"
    assert part_of("transformer.h.0.mlp.c_proj") == "mlp"
    assert part_of(f"{LAYER}.self_attn.indexer.wk") == ""  # known, and not adapted
    assert part_of(f"{LAYER}.self_attn.mystery") is None


def test_sites_are_slices_and_experts_too():
    assert part_of_site(f"{LAYER}.linear_attn.in_proj_q") == "attn"
    assert part_of_site(f"{LAYER}.mixer.x_proj") == "attn"
    assert part_of_site(f"{LAYER}.mlp.experts.w2") == "mlp"
    assert part_of_site(f"{LAYER}.mlp.experts.gate_proj") is None
    assert parts_of_sites([f"{LAYER}.mlp.fc1", "lm_head"]) == {"mlp", "unembed"}
    assert parts_of_sites([f"{LAYER}.mlp.fc1", f"{LAYER}.mlp.router"]) == set()


def test_engine_disables_downloaded_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("USE_HUB_KERNELS")
    importlib.reload(tinsmith.engine)
    assert os.environ["USE_HUB_KERNELS"] == "0"
    from transformers.integrations import hub_kernels

    assert not hub_kernels._kernels_enabled
