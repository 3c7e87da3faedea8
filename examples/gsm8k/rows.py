"""Rows of GSM8K made into what a model is told before it is rewarded: short solutions, without GSM8K's own marks."""

from __future__ import annotations

import re
from collections.abc import Mapping

_CALCULATED = re.compile(r"<<[^>]*>>")
_LONGEST = 200
"""Characters of a solution."""


def is_short(row: Mapping[str, str]) -> bool:
    """Whether the solution fits into a short answer, and works something out as `smollm2.yaml` wants it."""
    return len(row["answer"]) <= _LONGEST and "<<" in row["answer"]


def marked(row: Mapping[str, str]) -> dict[str, str]:
    """`reply`: the solution in short lines, then #### and the number."""
    return {"reply": _CALCULATED.sub("", row["answer"])}


def tagged(row: Mapping[str, str]) -> dict[str, str]:
    """`reply`: as Trinity-RFT's system message asks, <think> … </think> <answer> … </answer>."""
    solution, _, number = _CALCULATED.sub("", row["answer"]).partition("\n#### ")
    return {"reply": f"<think> {solution} </think> <answer> {number} </answer>"}
