"""Rows of GSM8K as demonstrations for the supervised stage: short solutions without GSM8K's calculator marks."""

from __future__ import annotations

import re
from collections.abc import Mapping

_CALCULATED = re.compile(r"<<[^>]*>>")
_LONGEST = 200
"""Characters of a solution."""


def is_short(row: Mapping[str, str]) -> bool:
    """Whether the solution is short and contains a calculation, as the format of `smollm2.yaml` requires."""
    return len(row["answer"]) <= _LONGEST and "<<" in row["answer"]


def marked(row: Mapping[str, str]) -> dict[str, str]:
    """`reply`: the solution in short lines, then #### and the number."""
    return {"reply": _CALCULATED.sub("", row["answer"])}


def tagged(row: Mapping[str, str]) -> dict[str, str]:
    """`reply`: the format of Trinity-RFT's system message, <think> … </think> <answer> … </answer>."""
    solution, _, number = _CALCULATED.sub("", row["answer"]).partition("\n#### ")
    return {"reply": f"<think> {solution} </think> <answer> {number} </answer>"}
