"""A verifiers package whose task has a tool server."""

from word_tools.taskset import WordTaskset

__all__ = ["WordTaskset"]
