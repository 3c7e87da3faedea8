"""rLLM: its configurations in `files`, and the classes and functions of its Python API in the other modules.

Users import the API from `tinsmith.rllm`. The guide is docs/from/rllm.md.
"""
