"""PEFT's LoRA settings, as adapter_config.json holds them: those that are read, have no effect here, or are refused.

Each field of PEFT's LoraConfig is in one of the tables below. An option that is in none of them is refused too, unless
it is empty: it may change what the matrices mean. Imports no torch: the API process reads the settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from tinsmith.engine.model_parts import HEAD
from tinsmith.errors import Unsupported

READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
"""Settings of the matrices' ranks and scales."""
SELECTIONS = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"}
"""Settings that say which modules have matrices."""
NO_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "runtime_config", "lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config",
}  # fmt: skip
"""Settings that alone do not change what the matrices mean. `fan_in_fan_out` says how the base model stores its own."""
VALUES: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}
"""Settings with the values that are accepted beside empty ones."""
REFUSED = {
    "modules_to_save": "Train it without modules_to_save: whole modules are no part of an adapter here.",
    "trainable_token_indices": "Train it without new tokens, or merge it with PEFT and serve the result.",
    "megatron_config": "Save it from a model without Megatron's parallel layers.",
    "use_dora": "Train it without DoRA, or merge it with PEFT and serve the result.",
    "velora_config": "Train it without VeLoRA.",
    "alora_invocation_tokens": "Train it without invocation tokens: adapters here apply to every token.",
    "use_qalora": "Train it without QALoRA.",
    "monteclora_config": "Train it without MonteCLoRA.",
    "layer_replication": "Merge it with PEFT and serve the result: the base model has another number of layers.",
    "lora_bias": "Train it without lora_bias.",
    "use_bdlora": "Train it without block-diagonal matrices.",
    "arrow_config": "Import the adapters that it routes between, one by one.",
    "kasa_config": "Merge it with PEFT and serve the result: KaSA changes the base model's weights.",
    "ensure_weight_tying": "Train it without adapters of tied embeddings.",
}
"""Settings that are refused unless they are empty, with what to do instead."""
_HINTS = {
    **REFUSED,
    "bias": "Train it with bias='none'.",
    "init_lora_weights": "The base model's weights were changed at the start. Save the adapter in PEFT with "
    "path_initial_model_for_weight_conversion, which makes it a plain one.",
}
_OTHER = "Only plain LoRA is supported."
_MATCH_SECONDS = 1.0
"""An expression that takes longer for a name is refused: a server matches those of its clients."""
_ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class PeftSettings:
    """Ranks, scales and modules of an adapter. Patterns are matched as PEFT matches them."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    target_parameters: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        """Rank of a module's matrices."""
        return self.rank_pattern.get(_matching(self.rank_pattern, module), self.rank)

    def alpha_of(self, module: str) -> float:
        """The alpha that gives a module's scale as alpha / rank."""
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.alpha)
        return alpha * math.sqrt(self.rank_of(module)) if self.use_rslora else alpha

    @property
    def has_plain_scale(self) -> bool:
        """Whether the scale of every module is lora_alpha / r."""
        return not (self.use_rslora or self.rank_pattern or self.alpha_pattern)

    @property
    def lists_modules(self) -> bool:
        """Whether the modules are named one by one, by their short or full names."""
        return isinstance(self.target_modules, tuple)

    @property
    def names_no_modules(self) -> bool:
        """Whether the settings leave open which modules have matrices."""
        return self.target_modules == _ALL_LINEAR or (self.target_modules is None and not self.target_parameters)

    @property
    def selects_layers(self) -> bool:
        """Whether some layers may have other modules than the rest."""
        if isinstance(self.target_modules, str) and self.target_modules != _ALL_LINEAR:
            return True
        named = self.target_modules if isinstance(self.target_modules, tuple) else ()
        has_number = any(regex.search(r"\.\d+\.", name) for name in (*named, *self.target_parameters))
        return has_number or self.layers is not None or bool(self.exclude_modules)

    def selects(self, module: str) -> bool:
        """Whether a linear module has matrices."""
        if self.exclude_modules and _is_named(self.exclude_modules, module):
            return False
        if self.target_modules is None:
            return not self.target_parameters
        if self.target_modules == _ALL_LINEAR:
            return module != HEAD
        if isinstance(self.target_modules, str) or module in self.target_modules:
            return _is_named(self.target_modules, module)
        return _is_named(self.target_modules, module) and (self.layers is None or _layer(self, module) in self.layers)


def read_settings(config: Mapping[str, Any], source: Path) -> PeftSettings:
    """The settings of an adapter_config.json. Raises Unsupported, with the option's name, unless it is plain LoRA."""
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise Unsupported(f"{source} holds an adapter with peft_type={kind!r}.", _OTHER)
    accepted = READ | SELECTIONS | NO_EFFECT
    changed = {key: value for key, value in config.items() if key not in accepted and value}
    for key, value in changed.items():
        if value not in VALUES.get(key, ()):
            raise Unsupported(f"{source} holds an adapter with {key}={value!r:.60}.", _HINTS.get(key, _OTHER))
    settings = PeftSettings(
        rank=_rank(config.get("r"), "r", source),
        alpha=_alpha(config.get("lora_alpha"), "lora_alpha", source),
        rank_pattern=_pattern(config, "rank_pattern", source, _rank),
        alpha_pattern=_pattern(config, "alpha_pattern", source, _alpha),
        use_rslora=bool(config.get("use_rslora")),
        target_modules=_names(config, "target_modules", source),
        exclude_modules=_names(config, "exclude_modules", source) or (),
        layers=_layers(config.get("layers_to_transform"), source),
        layers_pattern=_listed(config, "layers_pattern", source),
        target_parameters=_listed(config, "target_parameters", source),
    )
    expressions = {"layers_pattern": settings.layers_pattern}
    for key in ("target_modules", "exclude_modules"):
        value = config.get(key)
        expressions[key] = (value,) if isinstance(value, str) and value != _ALL_LINEAR else ()
    for key, patterns in expressions.items():
        _check_expressions(patterns, key, source)
    return settings


def patterns(modules: Mapping[str, tuple[int, float]], rank: int, alpha: float) -> dict[str, dict[str, Any]]:
    """`rank_pattern` and `alpha_pattern` that give modules their rank and alpha, where `r` and `lora_alpha` do not.

    Modules have their short names where all of a name have the same values.
    """
    by_leaf: dict[str, dict[str, tuple[int, float]]] = {}
    for path, values in modules.items():
        by_leaf.setdefault(path.rpartition(".")[2], {})[path] = values
    named: dict[str, tuple[int, float]] = {}
    for leaf, paths in by_leaf.items():
        is_same = len(set(paths.values())) == 1
        named |= {leaf: next(iter(paths.values()))} if is_same else {regex.escape(path): paths[path] for path in paths}
    return {
        "rank_pattern": {name: own for name, (own, _) in named.items() if own != rank},
        "alpha_pattern": {name: own for name, (_, own) in named.items() if own != alpha},
    }


def _is_named(names: str | Iterable[str], module: str) -> bool:
    """Whether a regular expression, or a list of names or their ends, names a module."""
    if isinstance(names, str):
        return _match(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _layer(settings: PeftSettings, module: str) -> int | None:
    """The number of a module's layer."""
    patterns = [rf"(?:.*?\.)?{pattern}\.(?P<layer>\d+)\." for pattern in settings.layers_pattern]
    patterns = patterns or [r".*?\.[^.]*\.(?P<layer>\d+)\."]
    matches = (_match(rf"{pattern}.*", module) for pattern in patterns)
    return next((int(match["layer"]) for match in matches if match), None)


def _matching(patterns: Iterable[str], module: str) -> str:
    """The first pattern that matches a module's path or its end; the path itself if there is none."""
    return next((pattern for pattern in patterns if _match(rf"(.*\.)?({pattern})", module)), module)


def _match(expression: str, module: str) -> regex.Match[str] | None:
    """The match of a regular expression with the whole of a name. Raises Unsupported if it takes too long."""
    try:
        return regex.fullmatch(expression, module, timeout=_MATCH_SECONDS)
    except TimeoutError as error:
        raise Unsupported(
            f"The expression {expression!r:.80} takes too long to match {module}.", "Write it without nested repeats."
        ) from error
    except regex.error as error:
        raise Unsupported(
            f"{expression!r:.80} is not a regular expression: {error}.", "Write a simpler one."
        ) from error


def _pattern(config: Mapping[str, Any], key: str, source: Path, read: Any) -> dict[str, Any]:
    pattern = config.get(key) or {}
    if not isinstance(pattern, Mapping):
        raise Unsupported(f"{key} of {source} is {pattern!r:.60}.", "It maps names of modules to numbers.")
    _check_expressions(pattern, key, source)
    return {name: read(value, f"{key}[{name!r}]", source) for name, value in pattern.items()}


def _check_expressions(expressions: Iterable[str], key: str, source: Path) -> None:
    for expression in expressions:
        try:
            regex.compile(f"({expression})")
        except regex.error as error:
            raise Unsupported(
                f"{key} of {source} has {expression!r}, which is not a regular expression: {error}.",
                "Write names as Python's re takes them.",
            ) from error


def _rank(value: object, key: str, source: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Unsupported(f"{key} of {source} is {value!r:.60}.", "A rank is an integer from 1 on.")
    return value


def _alpha(value: object, key: str, source: Path) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise Unsupported(f"{key} of {source} is {value!r:.60}.", "It is a finite number.")
    return float(value)


def _names(config: Mapping[str, Any], key: str, source: Path) -> str | tuple[str, ...] | None:
    """Names as a regular expression or a tuple; None for none."""
    value = config.get(key)
    if isinstance(value, str):
        return _ALL_LINEAR if value.lower() == _ALL_LINEAR else value
    return None if value is None else _listed(config, key, source)


def _listed(config: Mapping[str, Any], key: str, source: Path) -> tuple[str, ...]:
    value = config.get(key) or []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
        raise Unsupported(f"{key} of {source} is {value!r:.60}.", "It is a name or a list of names.")
    return tuple(values)


def _layers(value: object, source: Path) -> tuple[int, ...] | None:
    layers = [value] if isinstance(value, int) else value
    if not layers:
        return None
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise Unsupported(f"layers_to_transform of {source} is {value!r:.60}.", "It is a list of layers' numbers.")
    return tuple(layers)
