"""A conversation: its system prompt and its turns."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Conversation:
    """What was said so far.

    Example: Conversation(system="Be brief.", turns=[("What is 39 + 13?", "52")])
    """

    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of a message and its reply."""

    def with_message(self, text: str) -> list[dict[str, str]]:
        """The messages to send for the next reply, the last of them `text`."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for message, reply in self.turns:
            messages += [{"role": "user", "content": message}, {"role": "assistant", "content": reply}]
        return [*messages, {"role": "user", "content": text}]
