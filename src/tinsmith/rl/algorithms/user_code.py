"""Algorithms that users write: a function that returns the parts of one, by the keys of a run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.rl.plugins import KINDS, CustomPart, Kind, import_object, path_text
from tinsmith.settings import did_you_mean

OF_THE_RUN = ("optimizer", "updates")
"""Sections of a run file, beside `algorithm`, that an algorithm may set."""


class CustomAlgorithm(CustomPart):
    """User code: a function that returns the parts of an algorithm, a mapping with keys of `algorithm` (`type` is the
    preset that it changes) and with the sections `optimizer` and `updates`. A run file overrides them.

    An advantage or a loss may be the function itself.

    Example: def gentle(clip=0.1): return {"type": "rloo", "loss": {"clip_high": clip}, "updates": {"epochs": 2}}
    """

    kind: ClassVar[Kind] = "algorithm"

    @override
    def check_code(self) -> None:
        try:
            self.parts()
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def parts(self) -> dict[str, Any]:
        """What the function returns, with functions as `custom` parts. Raises ConfigError for anything else."""
        function, _ = self.function_of()
        returned = function()
        if not isinstance(returned, Mapping):
            raise self.fault(f"returned {returned!r:.80}", "Return a mapping with keys of algorithm.")
        keys = (*KINDS["algorithm"].keys, *OF_THE_RUN, "type")
        if unknown := [key for key in returned if key not in keys]:
            suggestion = did_you_mean(str(unknown[0]), keys) or f"Known here: {', '.join(keys)}."
            raise self.fault(f"returned the key '{unknown[0]}'", suggestion)
        return {key: _as_part(value) if key in ("advantage", "loss") else value for key, value in returned.items()}

    @property
    def title(self) -> str:
        """The name of the algorithm: that of its function."""
        return path_text(self.path).rpartition(":")[2]


def _as_part(value: Any) -> Any:
    return {"type": "custom", "path": value} if callable(value) else value


def parts_of_run(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run file whose algorithm is user code, with the other sections that it sets.

    Raises ValueError if its path or its arguments are wrong.
    """
    section = values.get("algorithm")
    if not (isinstance(section, Mapping) and section.get("type") == "custom" and "path" in section):
        return dict(values)
    import_object(section["path"])
    parts = CustomAlgorithm(path=section["path"], args=section.get("args", {})).parts()
    own = {
        key: {**parts[key], **values.get(key, {})}
        for key in OF_THE_RUN
        if isinstance(parts.get(key), Mapping) and isinstance(values.get(key, {}), Mapping)
    }
    return {**values, **own}
