"""Environments: tasks, the workflow that solves them, and their rewards, under one name. A run may mix several.

Each environment is a settings class derived from `EnvironmentOptions`; a run file selects one by its `type`. The types
are in `registry`.
"""
