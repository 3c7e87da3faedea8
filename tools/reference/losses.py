"""The losses of the service: inputs, settings and defaults, from the table that requests are checked by."""

from __future__ import annotations

from tinsmith.engine.training.loss_specs import LOSSES, SHADOW, SHADOW_SPEC


def table() -> str:
    """A row for each loss_fn but `custom`."""
    lines = [
        "| `loss_fn` | required inputs | optional inputs | `loss_fn_config` (default) |",
        "| --- | --- | --- | --- |",
    ]
    for name, spec in {**LOSSES, SHADOW: SHADOW_SPEC}.items():
        numbers = {key: "required" if value is None else f"{value:g}" for key, value in spec.config.items()}
        others = {**{key: names[0] for key, names in spec.choices.items()}, **dict.fromkeys(spec.texts, "empty")}
        config = ", ".join(f"`{key}` ({default})" for key, default in {**numbers, **others}.items())
        lines.append(f"| `{name}` | {_names(spec.required)} | {_names(spec.optional)} | {config} |")
    return "\n".join(lines)


def _names(inputs: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in inputs)
