"""Any JSON, and bodies with one part changed, as a careless client sends them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Raw:
    """JSON text that Python does not write."""

    text: str


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
HUGE = st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, int("9" * 4000), 1e308])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), HUGE, st.floats(), ANY_TEXT)
ANY_JSON = st.recursive(
    SCALARS,
    lambda part: st.one_of(st.lists(part, max_size=3), st.dictionaries(ANY_TEXT, part, max_size=3)),
    max_leaves=6,
)
DEEP = st.sampled_from(["[" * 90 + "]" * 90, "[" * 3000 + "]" * 3000, '{"a":' * 2000 + "1" + "}" * 2000]).map(
    lambda text: Raw(text)
)


def changed(value: Any, new: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The value with one part replaced by another, or with a key more."""
    if isinstance(value, dict) and value:
        parts = [changed(part, new).map(lambda part, key=key: {**value, key: part}) for key, part in value.items()]
        more = st.tuples(ANY_TEXT, new).map(lambda pair: {**value, pair[0]: pair[1]})
        return st.one_of(new, more, *parts)
    if isinstance(value, list) and value:
        return st.one_of(new, changed(value[0], new).map(lambda part: [part, *value[1:]]))
    return new


def encode(value: Any) -> bytes:
    """JSON as a careless client writes it: NaN, halves of surrogate pairs."""
    if isinstance(value, Raw):
        return value.text.encode()
    if isinstance(value, dict):
        return b"{%b}" % b",".join(b"%b:%b" % (json.dumps(key).encode(), encode(part)) for key, part in value.items())
    if isinstance(value, list):
        return b"[%b]" % b",".join(map(encode, value))
    return json.dumps(value).encode()
