"""Fields of OpenAI's dialect that do nothing here: each is let through where it means nothing, else refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.errors import Unsupported

_NOT_DONE = "Leave it out: this server does not do it."
_CONSTRAINED = "Leave it out: answers are not constrained here. Ask for the form in the prompt and check what comes."
_FREE = object()
"""Any value will do: it has no bearing on an answer of this server."""

FIELDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "frequency_penalty": ((0,), "Only 0: logprobs here are those of the model, without penalties."),
    "presence_penalty": ((0,), "Only 0: logprobs here are those of the model, without penalties."),
    "repetition_penalty": ((1,), "Only 1: logprobs here are those of the model, without penalties."),
    "logit_bias": (({},), "Leave it out: logprobs here are those of the model, without a bias."),
    "min_p": ((0,), "Only 0; use top_p or top_k."),
    "typical_p": ((1,), "Only 1; use top_p or top_k."),
    "min_tokens": ((0,), "Only 0."),
    "length_penalty": ((1,), _NOT_DONE),
    "use_beam_search": ((False,), _NOT_DONE),
    "best_of": ((1,), "Use n, and choose by yourself."),
    "suffix": (("",), _NOT_DONE),
    "response_format": (({"type": "text"},), _CONSTRAINED),
    "structured_outputs": ((), _CONSTRAINED),
    "guided_json": ((), _CONSTRAINED),
    "guided_regex": ((), _CONSTRAINED),
    "guided_choice": ((), _CONSTRAINED),
    "guided_grammar": ((), _CONSTRAINED),
    "allowed_token_ids": ((), _CONSTRAINED),
    "bad_words": (([],), _CONSTRAINED),
    "parallel_tool_calls": ((True,), "Only true: how many calls a model makes is not constrained here."),
    "functions": ((), "Use tools."),
    "function_call": (("auto", "none"), "Use tools and tool_choice."),
    "modalities": ((["text"],), "Text only."),
    "audio": ((), "Text only."),
    "prediction": ((), _NOT_DONE),
    "reasoning_effort": ((), "Use chat_template_kwargs, if the model's chat template knows of it."),
    "verbosity": ((), _NOT_DONE),
    "web_search_options": ((), _NOT_DONE),
    "store": ((False,), "Answers are not stored here."),
    "chat_template": ((), "The model's own chat template is used; render by yourself and use /v1/completions."),
    "documents": ((), "Put them into the messages."),
    "truncate_prompt_tokens": ((), "Cut the prompt by yourself."),
    "prompt_logprobs": ((), "Use /v1/completions with echo and logprobs."),
    "detokenize": ((True,), "Use /inference/v1/generate, which answers tokens."),
    "spaces_between_special_tokens": ((True,), _NOT_DONE),
    "features": ((), "Text only."),
    "content_parts": ((), "Text only."),
    "kv_transfer_params": ((), _NOT_DONE),
    "mm_processor_kwargs": ((), "Text only."),
    "priority": ((0,), "Only 0: requests are served in turn."),
    "stream_interval": ((1,), _NOT_DONE),
    "routed_experts_prompt_start": ((_FREE,), ""),
    "user": ((_FREE,), ""),
    "safety_identifier": ((_FREE,), ""),
    "metadata": ((_FREE,), ""),
    "prompt_cache_key": ((_FREE,), ""),
    "prompt_cache_retention": ((_FREE,), ""),
    "cache_salt": ((_FREE,), ""),
    "service_tier": (("auto", "default"), "There is one."),
    "request_id": ((_FREE,), ""),
}
"""Fields that do nothing here: the values that mean nothing, and what to do instead of others. A `cache_salt` keeps
prefix caches apart, and weights are never mixed in ours; experts are routed in models that are not served."""


def let_through(name: str, value: Any, where: str = "") -> None:
    """Raises Unsupported unless this value of one of FIELDS has no bearing on an answer."""
    allowed, cure = FIELDS[name]
    if value is not None and _FREE not in allowed and value not in allowed:
        raise Unsupported(f"{where}{name} is not served here.", cure)
