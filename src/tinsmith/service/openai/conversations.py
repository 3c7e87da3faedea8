"""A request for a chat completion -> the prompt's tokens, by the model's own template."""

from __future__ import annotations

from typing import Any

from tinsmith.errors import BadRequest
from tinsmith.openai.messages import plain_messages, plain_tools
from tinsmith.openai.toolcalls import Form, form_of
from tinsmith.service.openai.bodies import ChatBody
from tinsmith.service.openai.texts import Words


def tools_of(asked: ChatBody) -> list[dict[str, Any]]:
    """The tools that the model is told of. Raises BadRequest or Unsupported."""
    return plain_tools(asked.tools, asked.tool_choice)


def prompt_of(asked: ChatBody, words: Words) -> tuple[list[int], Form | None]:
    """(the prompt's tokens, the form of the tool calls to look for). Takes milliseconds: not for the event loop."""
    tools = tools_of(asked)
    template = words.template(tools)
    form = form_of(template, words.name) if tools else None
    begins = asked.add_generation_prompt and "add_generation_prompt" in asked.model_fields_set
    if asked.continue_final_message and begins:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other.",
            "Set add_generation_prompt to false, or leave it out.",
        )
    ids = words.render(
        plain_messages(asked.messages, knows_developer="developer" in template),
        tools,
        begin=asked.add_generation_prompt and not asked.continue_final_message,
        go_on=asked.continue_final_message,
        values=asked.chat_template_kwargs,
    )
    return ids, form
