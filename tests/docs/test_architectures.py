"""The table of architectures against the code of today: some types measured again, and every type has a row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.architectures import RESULTS, TYPES, measure
from tests import vision

BOUND = 1e-3
"""Largest error of a logprob on tiny random models in float32, whose scans and routers amplify rounding."""


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["type"]: row for row in json.loads(RESULTS.read_text())}


def test_every_type_has_a_row(rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows) == list(TYPES)


def test_served_types_are_exact(rows: dict[str, dict[str, Any]]) -> None:
    served = [row for row in rows.values() if row["path"] in ("fast", "general")]
    assert len(served) >= 10
    assert [row["type"] for row in served if row["logprob_error"] > BOUND or not row.get("greedy", True)] == []


def test_types_with_images_are_those_with_a_tower(rows: dict[str, dict[str, Any]]) -> None:
    assert [row["type"] for row in rows.values() if row.get("images")] == list(vision.TYPES)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe", "qwen3_vl"])
def test_rows_are_those_of_today(model_type: str, rows: dict[str, dict[str, Any]]) -> None:
    today, stored = measure(model_type), rows[model_type]
    for key in ("path", "attn", "mlp", "greedy", "images"):
        assert today.get(key) == stored.get(key)
    assert today.get("logprob_error", 0) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_all_rows_are_those_of_today(model_type: str, rows: dict[str, dict[str, Any]]) -> None:
    today, stored = measure(model_type), rows[model_type]
    assert (today["path"], today.get("attn"), today.get("mlp")) == (
        stored["path"],
        stored.get("attn"),
        stored.get("mlp"),
    )
