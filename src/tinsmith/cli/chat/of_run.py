"""How a run talks to its model, for a chat with its weights: system prompt, sampling and chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinsmith.cli.chat.replies import Messages, ReplySettings
from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from tinsmith.cli.service.weights import ServedWeights
    from tinsmith.rl.history import RunHistory
    from tinsmith.rl.policy.chat import Chat

_PARAMETERS = {"top_p": 1.0, "top_k": -1}
"""Sampling settings that are parameters of the OpenAI API by the same name, with their defaults."""
_UNUSED = ("method", "max_prompt_tokens", "max_total_tokens")


def reply_settings(weights: ServedWeights) -> ReplySettings:
    """The sampling settings of the run, and the values of its chat template; of other weights, the server's."""
    sampling = _mapping(weights.settings.get("sampling"))
    more = {name: sampling[name] for name, default in _PARAMETERS.items() if sampling.get(name, default) != default}
    stop = sampling.get("stop")
    if stop is not None:
        more |= {"stop_token_ids" if stop and isinstance(stop[0], int) else "stop": stop} if stop else {}
        more["ignore_eos"] = True  # only these end a reply
    return ReplySettings(
        max_tokens=sampling.get("max_tokens"),
        temperature=sampling.get("temperature"),
        more=more,
        template_values=_mapping(_mapping(weights.settings.get("model")).get("chat_template_values")),
    )


def unused_settings(weights: ServedWeights) -> list[str]:
    """The sampling settings of the run that have no effect in a chat."""
    sampling = _mapping(weights.settings.get("sampling"))
    return [f"sampling.{name}" for name in _UNUSED if sampling.get(name) is not None]


def system_prompt(weights: ServedWeights) -> str:
    """The system prompt of the run's tasks or, if these have none or several, that of its newest rollout."""
    if weights.run is None:
        return ""
    sections = (weights.settings.get("tasks"), weights.settings.get("demonstrations"))
    prompts = dict.fromkeys(text for section in sections for text in _values_of("system", section))
    of_rows = any(key for section in sections for key in _values_of("system_key", section))
    return next(iter(prompts)) if len(prompts) == 1 and not of_rows else _of_newest_rollout(weights.run)


def _of_newest_rollout(run: RunHistory) -> str:
    from tinsmith.rl.history.transcript import transcript

    for row in run.rollouts.find(limit=1).rows:
        sent = transcript(run.rollouts.read(row)).messages
        return next((content for role, content in sent if role == "system"), "")
    return ""


def _values_of(key: str, settings: Any) -> Iterator[str]:
    """The texts of this key in nested settings."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            if name == key and isinstance(value, str) and value:
                yield value
            else:
                yield from _values_of(key, value)
    elif isinstance(settings, list):
        for value in settings:
            yield from _values_of(key, value)


def has_own_template(weights: ServedWeights) -> bool:
    """Whether the run renders chats with another template or tokenizer than its model's."""
    model = _mapping(weights.settings.get("model"))
    return bool(model.get("chat_template") or model.get("tokenizer"))


def template_settings(weights: ServedWeights) -> dict[str, Any]:
    """The settings of the run's model that its tokenizer and chat template depend on."""
    model = _mapping(weights.settings.get("model"))
    return {name: model[name] for name in ("tokenizer", "chat_template", "chat_template_values") if name in model}


def encoder(chat: Chat) -> Callable[[Messages], Sequence[int]]:
    """A function that renders a conversation as the run does."""
    from tinsmith.rl.types import Message

    def encode(messages: Messages) -> Sequence[int]:
        return chat.prompt([Message(role=each["role"], content=each["content"]) for each in messages])

    return encode


def check_options(max_tokens: int | None, temperature: float | None) -> None:
    """Raise ConfigError for values that no reply can be sampled with."""
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"--max-tokens is {max_tokens}.", "Give 1 or more.")
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise ConfigError(f"--temperature is {temperature}.", "Give 0, which is greedy, or more.")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
