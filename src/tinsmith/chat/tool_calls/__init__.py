"""Tool calls in generated text: formats of chat templates, grammars of calls, and an incremental parser.

The rules are a table in docs/reference/tool-calls.md.
"""
