"""The table of model architectures, from the measurements of `benchmarks.architectures`."""

from __future__ import annotations

import json
from typing import Any

from tools.reference.results import RESULTS


def table() -> str:
    """The served types with path, images, reach of adapters and error; then why some take the general path or none."""
    rows = json.loads((RESULTS / "architectures.json").read_text())
    served = [row for row in rows if row["path"] in ("fast", "general")]
    lines = [
        f"{len(served)} of {len(rows)} types are served.",
        "",
        "| type | path | images | `train_attn` reaches | `train_mlp` reaches | error of logprobs | greedy tokens |",
        "|---|---|---|---|---|---|---|",
        *map(_served, served),
        "",
        "On the general path, because the fast path refuses it:",
        "",
        *_reasons([row for row in served if row["path"] == "general"]),
        "",
        "Not served:",
        "",
        *_reasons([row for row in rows if row not in served]),
    ]
    return "\n".join(lines)


def _reasons(rows: list[dict[str, Any]]) -> list[str]:
    return ["| type | reason |", "|---|---|", *(f"| `{row['type']}` | {row['reason']} |" for row in rows)]


def _served(row: dict[str, Any]) -> str:
    greedy = f"served up to its window ({row['limit']} here)" if "limit" in row else "differ"
    greedy = "equal" if row.get("greedy") else greedy
    attn, mlp = (" ".join(f"`{name}`" for name in row[part]) for part in ("attn", "mlp"))
    if unreached := row.get("unreached"):
        mlp = f"refused: adapters do not reach {' '.join(f'`{name}`' for name in unreached)}"
    images = "yes" if row.get("images") else "no"
    return f"| `{row['type']}` | {row['path']} | {images} | {attn} | {mlp} | {row['logprob_error']:.0e} | {greedy} |"
