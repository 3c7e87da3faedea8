"""Runs Python code that a model wrote, with limits, and tests it."""
